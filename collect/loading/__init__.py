"""Reads run folders into typed runs and frames. Damaged files are listed and never raise an error."""
