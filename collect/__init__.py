"""The command `collect`: makes tables, figures, verdicts and a report from the records of all nodes."""

import os

# When numpy is imported, OpenBLAS starts a thread for each core, and each thread waits for work in a loop at first. This took
# 0.1 s of processor time per process on a machine with 2 cores, and `collect` computes no linear algebra.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
