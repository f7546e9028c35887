"""Runs on the nodes: one run in, records out. Nothing here imports torch before a run needs it."""
