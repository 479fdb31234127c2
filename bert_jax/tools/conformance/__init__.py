"""Checks that this package follows google-research/bert, by stored outputs and by formulas."""
