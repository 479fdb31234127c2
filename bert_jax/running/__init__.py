"""The life of a run: start, training loop, saving, resuming, logging and progress."""
