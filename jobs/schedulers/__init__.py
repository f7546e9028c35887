"""The schedulers, which queue and start runs: one file for each scheduler."""
