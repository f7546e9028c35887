"""Reads data sets in their official file formats, and generates synthetic data sets, which need no files."""
