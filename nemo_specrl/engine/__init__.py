"""Inside vLLM: verification of drafts and continuation from them. Knows nothing of NeMo-RL."""
