"""The vocabulary that every other folder shares: what a cluster, a matrix, a run and a record are."""

__version__ = "0.1.0"
