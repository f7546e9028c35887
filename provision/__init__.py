"""Prepares the machines of a cluster for training, and verifies them. A machine may be bare, or managed by its site."""
