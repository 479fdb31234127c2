"""Several processes that are one run: peers, rendezvous, slices, watchdog."""
