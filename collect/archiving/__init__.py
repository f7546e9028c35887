"""Archives: one file with the runs of a matrix, the report, and what is needed to repeat the matrix (see shardlab.archive)."""
