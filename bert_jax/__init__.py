"""Pre-train BERT from plain text with JAX: one CPU today, a TPU pod tomorrow, the same config."""

__version__ = "0.1.0"
