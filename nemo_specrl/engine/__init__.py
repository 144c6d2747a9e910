"""Speculation with vLLM: verification of drafts and continuation from accepted prefixes."""
