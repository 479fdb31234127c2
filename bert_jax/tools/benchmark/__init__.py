"""Runs the tasks of a suite, and writes their table and the files of their predictions."""
