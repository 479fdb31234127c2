"""Pre-training: the job, its evaluators, and the model that it leaves."""
