"""Compares two workspaces, or two matrices of a workspace: the results of cells in both, and the machines that they ran on."""
