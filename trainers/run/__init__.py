"""One run on one rank: the training loop and the result."""
