"""The embedded default: GRPO, DAPO and PPO on one machine with the real engine and cache."""
