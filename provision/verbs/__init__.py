"""The verbs of `provision`."""
