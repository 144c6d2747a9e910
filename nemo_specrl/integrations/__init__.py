"""Frameworks that the plug-in works in, one package for each."""
