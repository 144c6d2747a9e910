"""How fast are verification and rollouts on a GPU? A model of random weights."""
