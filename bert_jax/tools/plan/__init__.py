"""Plans runs on TPU pods with the TPU compiler alone: memory, speed and cost."""
