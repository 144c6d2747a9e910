"""Reuse of a prefix: verification of a whole draft by one prefill with prompt log-probs."""
