"""Readers of data sets in their official file formats, and synthetic data sets, which need no files."""
