"""Compares two workspaces or two matrices of one workspace: the same cells, their results, and the machines they ran on."""
