"""Which draft serves which request, and how much of it stands. Numpy only: no torch, no vLLM."""
