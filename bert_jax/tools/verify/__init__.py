"""Proves that a run that is killed and resumed ends bit-identical to an undisturbed run."""
