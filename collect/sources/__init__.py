"""Reads record files and logs of runs: each module turns one format into a polars frame or into plain objects."""
