"""Checkpoints of a run: the state of an engine, where its bytes are, and how they are written and read."""
