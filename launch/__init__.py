"""Launchers, which start a run on this machine or on rented ones: `python -m launch NAME`."""
