"""Shows where a number of the summary comes from: its metric, formula, repeats, runs, and lines of record files."""
