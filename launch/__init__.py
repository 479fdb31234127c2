"""Launchers, which start a run on this machine or on rented ones: `bert-jax launch LAUNCHER`."""
