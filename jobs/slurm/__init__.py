"""Slurm's commands, parsers of their output, and the exactly-once submission. The options of a job are in `jobs/rendering`."""
