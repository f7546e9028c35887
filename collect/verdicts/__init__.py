"""Reported beside measured: what a study printed, what was measured here, and which of its claims hold."""
