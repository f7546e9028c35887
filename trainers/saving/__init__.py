"""Checkpoints of a run: what an engine goes on from, which bytes of it lie where, and how they are written and read."""
