"""Compares a study with the measurements: its printed numbers, and which of its claims hold."""
