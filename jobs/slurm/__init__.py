"""Slurm as jobs use it: what is asked of it, how it is asked, and how its answers are read."""
