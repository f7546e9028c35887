"""Archives. An archive is one file with the runs of a matrix, the report, and all that is needed to repeat the matrix.

The format of an archive is defined in shardlab.workspace.archive.
"""
