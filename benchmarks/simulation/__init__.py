"""What the simulated engine says about choices that a machine without GPUs cannot measure."""
