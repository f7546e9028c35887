"""From a plan to the folder of a run: run.json, its script and the copy of our source."""
