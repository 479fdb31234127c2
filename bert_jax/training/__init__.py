"""The mathematics of training: the step, its state and batches on devices."""
