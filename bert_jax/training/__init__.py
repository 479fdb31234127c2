"""Losses to checkpoints: the step, the loop, the state."""
