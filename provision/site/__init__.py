"""Managed Slurm sites: what a site offers, the node where users log in, and the environment that jobs use. No root."""
