"""Checks the rules of google-research/bert against stored outputs of it and of other code."""
