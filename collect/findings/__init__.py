"""Computes results from the measured values of cells and runs: estimates, comparisons and tables. They are not yet text."""
