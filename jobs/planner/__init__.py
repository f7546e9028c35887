"""Predicts memory, time and traffic of a cell before it is queued, from arithmetic and data alone, without torch."""
