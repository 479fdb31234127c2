"""What an encoder is for: examples, their scores, and how a base learns a task."""
