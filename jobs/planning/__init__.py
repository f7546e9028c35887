"""From a matrix to a plan: resolved cells, repeats, predictions, rehearsals and GPU hours."""
