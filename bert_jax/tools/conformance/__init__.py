"""The rules of google-research/bert, checked against what it and others gave."""
