"""The verbs of `jobs` and what they print."""
