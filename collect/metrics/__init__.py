"""Figures of merit, one file each: pure functions from a run's frames to a number with its unit."""
