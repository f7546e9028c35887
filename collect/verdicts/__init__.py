"""Compares a study (a paper or report) with the measurements: its printed numbers, and its claims."""
