"""The household of a run: how it starts, goes on, is kept, and is seen; the loop."""
