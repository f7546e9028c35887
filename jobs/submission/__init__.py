"""Decides which runs are sent, checks the lease and Slurm's answer first, and sends each run once."""
