"""The history of cells: runs of equal cells in several workspaces and archives, in the order of time."""
