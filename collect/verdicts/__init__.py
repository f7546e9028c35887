"""Compares a study (a paper or report) with the measurements: the numbers that it prints, and the claims that it makes."""
