"""The proof that a strategy does the same work as one process."""
