"""Batches to losses: the encoder, its heads, the fused loss."""
