"""Reads all runs of a workspace side by side, with the metrics of the user."""
