"""Compares two workspaces, or two matrices of a workspace: the results of cells that both contain, and their machines."""
