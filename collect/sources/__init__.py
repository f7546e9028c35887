"""A file format -> a frame."""
