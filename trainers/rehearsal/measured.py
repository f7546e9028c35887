"""The measured error of rehearsals, which each answer names. tests/test_trainers_rehearsal.py repeats the measurements."""

ERROR_PCT = 1.1
"""The largest difference of peak_bytes from the peak that torch's CPU allocator counted, in percent of the latter."""
ERROR_FROM = "on 16 cells of tiny models with 14 strategies, against the allocations of real steps on a CPU"
EXTRAPOLATED_PCT = 0.9
"""What the extrapolation to a depth adds: the largest difference of peak_bytes from a rehearsal at the cell's own depth."""
