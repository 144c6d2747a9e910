"""Trained policies: the interface that the trainer uses, and one module for each backend."""
