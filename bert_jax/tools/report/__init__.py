"""What a run looks like: one page that explains it, and event files for TensorBoard."""
