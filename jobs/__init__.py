"""Plans, renders, submits and tracks the runs of a matrix."""
