"""Vectors and answers over HTTP."""
