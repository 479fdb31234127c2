"""The kinds of tasks whose vectors of queries and of texts are compared by a score."""
