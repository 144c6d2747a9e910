"""A simulated rollout phase: what each method would bring, before it is switched on."""
