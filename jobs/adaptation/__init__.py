"""Adapts a matrix to a cluster on which some of its cells do not fit: which cells change, and the file of the new matrix."""
