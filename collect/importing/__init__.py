"""Turns logs of other programs into runs, which reports show beside our own."""
