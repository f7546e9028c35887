"""A frame -> a file, one format each."""
