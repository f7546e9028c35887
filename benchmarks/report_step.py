"""Measures how long a training script waits for `shardlab.steps.report`, beside a bare json.dumps and os.write of one line.

    python benchmarks/report_step.py [--calls 20000] [--rounds 5]

Both write as many lines to files in the same folder, alternately, in one process; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from shardlab import steps


def time_bare_writes(path: Path, calls: int) -> float:
    """Microseconds of a json.dumps and os.write of what a script tells of a step, in the mean."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    started_s = time.perf_counter()
    for step in range(calls):
        os.write(descriptor, json.dumps({"step": step, "loss": 2.7182818, "tokens": 8192}).encode() + b"\n")
    elapsed_s = time.perf_counter() - started_s
    os.close(descriptor)
    return 1e6 * elapsed_s / calls


def time_reports(calls: int) -> float:
    """Microseconds of a report, in the mean."""
    started_s = time.perf_counter()
    for step in range(calls):
        steps.report(step=step, loss=2.7182818, tokens=8192)
    return 1e6 * (time.perf_counter() - started_s) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[steps.FOLDER_VARIABLE] = folder
        steps.report(step=0)
        rounds = [
            (time_bare_writes(Path(folder) / "bare.jsonl", arguments.calls), time_reports(arguments.calls))
            for _ in range(arguments.rounds)
        ]
    ratio = statistics.median(report_us / bare_us for bare_us, report_us in rounds)
    print(f"json.dumps and os.write  {statistics.median(bare_us for bare_us, _ in rounds):6.1f} us")
    print(f"report                   {statistics.median(report_us for _, report_us in rounds):6.1f} us")
    print(f"ratio                    {ratio:6.2f}")


if __name__ == "__main__":
    main()
