"""The process that owns a run on its node: starts the launcher, watches it, records its end, and starts it again."""
