"""Starts the ranks of a rehearsal within a second: they are forked from the warm parent, a process that has already imported
torch and the models."""
