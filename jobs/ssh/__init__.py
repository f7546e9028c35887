"""Starts the tasks of a run on nodes without Slurm, over SSH."""
