"""How fast, always as a ratio measured within one run; `python -m benchmarks.NAME`."""
