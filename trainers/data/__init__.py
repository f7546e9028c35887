"""Readers of data sets in their own file formats, and synthetic ones where none is staged."""
