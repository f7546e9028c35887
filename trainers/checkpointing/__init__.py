"""Checkpoints of a run: the state of an engine as named parts, and the files to which the parts are written."""
