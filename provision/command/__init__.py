"""The command line of `provision`: its options, `provision init`, and what it shows."""
