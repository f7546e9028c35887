"""The workspace: its folders, the inventory in it, whether a command may act in it, and its archive."""
