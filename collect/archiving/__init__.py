"""Archives: one file with the runs of a matrix, its report and what is needed to repeat it; shardlab.archive has the format."""
