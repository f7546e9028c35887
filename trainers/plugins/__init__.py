"""Executes the user's own files for a workload or a strategy, and checks what they define."""
