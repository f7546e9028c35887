"""Loads a matrix with all its runs, in several processes if they are many, and computes the workspace's own metrics."""
