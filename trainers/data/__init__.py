"""Readers of data sets in their own file formats, and stand-ins where the real set is not there."""
