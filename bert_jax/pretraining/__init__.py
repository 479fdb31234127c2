"""Pre-training: the job, its evaluators, and the trained model."""
