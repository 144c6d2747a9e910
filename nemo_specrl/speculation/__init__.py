"""Choice of drafts, their acceptance, and statistics of reuse. Numpy only: no torch, no vLLM."""
