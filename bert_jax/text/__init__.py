"""Text to ids: documents, sentences, tokenizers. Never imports jax."""
