"""Vectors of texts: made, written to files, and searched."""
