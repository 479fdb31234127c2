"""Proves that a run that is killed at any moment is the run that was never killed."""
