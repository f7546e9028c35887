"""How jobs use Slurm: the options of a job, the commands, the parsers of their output, and the exactly-once submission."""
