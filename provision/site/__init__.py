"""Slurm sites that others administer: what a site offers, and the environment that jobs use. Everything works without root."""
