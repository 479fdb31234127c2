"""Checkpoints of others: Hugging Face folders to bases (`import`), and back (`export`)."""
