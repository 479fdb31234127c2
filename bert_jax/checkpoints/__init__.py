"""The state of a run on disk: saving, loading, forks, and bases to start from."""
