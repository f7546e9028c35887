"""The launchers, which start the ranks of a run: one file for each launcher."""
