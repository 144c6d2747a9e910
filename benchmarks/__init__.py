"""Measurements. A folder for each question; README.md lists scripts, data and the pages they serve.

Run from the repository's root, ``python -m benchmarks.FOLDER.SCRIPT``.
"""
