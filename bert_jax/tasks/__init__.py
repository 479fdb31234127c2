"""What an encoder is for: examples of a task, and scores of what is said of them."""
