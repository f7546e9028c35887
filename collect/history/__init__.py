"""The history of cells: the runs of the same cell in several workspaces and archives, ordered by time."""
