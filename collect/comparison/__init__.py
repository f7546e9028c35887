"""Two workspaces, or two matrices of one, side by side: the same cells, what they came to, and where they ran."""
