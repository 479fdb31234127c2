"""Kinds of tasks that score texts for queries by their vectors."""
