"""The embedded trainer: GRPO, DAPO and PPO on one machine with a vLLM engine and the cache."""
