"""Computes results from the measured values of cells and runs: estimates, comparisons and tables, which are not yet text."""
