"""Ids to NumPy batches: corpus, stream, pairs, masks. Never imports jax."""
