"""Finds out why the command of a run failed, if the exit code says too little: a full disk, or a signal that ended a rank.

Causes that a rank reports itself, such as full memory, are events: shardlab/runs/state.py names their writers.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

from shardlab.files import files

LEAST_FREE_BYTES = 1 << 20  # on a disk with less free space, ranks fail because they cannot write records
# What torchrun and deepspeed print about the first rank that failed, if a signal ended it: the rank (torchrun) and the signal.
_SIGNAL_MESSAGE = re.compile(
    rb"Root Cause[^\n]*\n\[0\]:\n(?:[^\n]*\n){0,2}\s*rank\s*: (?P<rank>\d{1,6})[^\n]*\n\s*exitcode\s*: -(?P<torchrun>\d{1,2})\b"
    rb"|exits with return code = -(?P<deepspeed>\d{1,2})\b"
)
# Signals that a rank gets because another rank or a person ended the run.
_CONSEQUENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def find_failure_cause(run_path: Path, job_log: Path) -> str:
    """Why the ranks of a run failed, as a clause; '' if neither the disk nor the output of the launcher says more than the
    exit code. run_path: the run's folder. job_log: the file with the output of the launcher."""
    if shutil.disk_usage(run_path).free < LEAST_FREE_BYTES:
        return f"the disk of {run_path} is full"
    try:
        log_bytes = files.read(job_log)
    except OSError:
        return ""
    for signal_match in _SIGNAL_MESSAGE.finditer(log_bytes):
        signal_number, rank = int(signal_match["torchrun"] or signal_match["deepspeed"]), (signal_match["rank"] or b"").decode()
        if signal_name := next(
            (
                known_signal.name
                for known_signal in signal.Signals
                if known_signal == signal_number and known_signal not in _CONSEQUENT_SIGNALS
            ),
            "",
        ):
            return f"{signal_name} ended {f'rank {rank}' if rank else 'a rank'}; see log/job.log"
    return ""
