"""Reads record files and logs of runs. Each module turns one format into a polars frame or into plain objects."""
