"""Everything about Slurm: the options of a job, Slurm's commands, parsers of their output, and the exactly-once submission."""
