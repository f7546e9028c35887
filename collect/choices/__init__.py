"""Computes which strategy to choose from the measurements: ranks the cells that do the same work, by each criterion."""
