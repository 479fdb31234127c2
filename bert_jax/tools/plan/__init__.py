"""Asks the TPU compiler about pods nobody has booked: what fits, how fast, at what cost."""
