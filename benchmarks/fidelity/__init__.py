"""Does reuse cost learning? Trainings with and without it, over settings and seeds."""
