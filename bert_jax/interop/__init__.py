"""Conversion from other libraries' checkpoints (`import`) and to them (`export`)."""
