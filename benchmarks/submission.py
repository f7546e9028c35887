"""Measures how long it takes to submit one run to Slurm with `jobs submit`, with submitit, and with sbatch alone.

    python benchmarks/submission.py CLUSTER.yaml [--rounds 7]

The benchmark needs a machine with Slurm's commands. The jobs may not start before tomorrow, and the benchmark cancels them at
the end. The three programs take turns, and each time is that of a whole process. `jobs submit` reads and checks a matrix,
renders the run, computes digests of the packages and the source, and writes to the disk what it submits and what Slurm answers.
submitit pickles a function call. The lines `imports of` show how long a program takes only to start and to import its modules.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from jobs.slurm import submission
from shardlab.workspace.workspace import Workspace

BEGIN = "now+1days"
MATRIX = """\
schema: 1
name: latency
defaults: {workload: gpt2-tiny, strategy: ddp, gpus: 2, global_batch_size: 4, seq_len: 16, steps: 6}
axes:
  seed: [%d]
"""
SUBMITIT = """
import sys, submitit
executor = submitit.SlurmExecutor(folder=sys.argv[1])
executor.update_parameters(partition=sys.argv[2], time=10, additional_parameters={"begin": sys.argv[3]})
print(executor.submit(print, 1).job_id)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.yaml", help="with slurm")
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    given = parser.parse_args()
    cluster = yaml.safe_load(given.cluster.read_text())
    partition = (cluster["slurm"] or {}).get("partition", "batch")
    cluster["slurm"] = {**(cluster["slurm"] or {}), "extra": {"begin": BEGIN}}
    took: dict[str, list[tuple[float, float]]] = {}
    sent: list[str] = []
    with tempfile.TemporaryDirectory(dir=given.cluster.absolute().parent) as temporary:
        workspace = Workspace(Path(temporary))
        (workspace.path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        matrix = workspace.path / "latency.yaml"
        ours = [sys.executable, "-P", "-m", "jobs"]
        commands = {
            "jobs submit": [*ours, "submit", "--matrix", str(matrix), "--workspace", temporary],
            "submitit": [sys.executable, "-c", SUBMITIT, f"{temporary}/submitit", partition, BEGIN],
            "sbatch alone": ["sbatch", "--parsable", f"--begin={BEGIN}", f"--partition={partition}", "--wrap=true"],
            "imports of jobs": [*ours, "--version"],
            "imports of submitit": [sys.executable, "-c", "import submitit"],
        }
        try:
            for number in range(-1, given.rounds):  # round -1 is warm-up
                matrix.write_text(MATRIX % (number + 1))
                for name, command in commands.items():
                    began, used = time.perf_counter(), _cpu_s()
                    said = subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True).stdout
                    if number >= 0:
                        took.setdefault(name, []).append((time.perf_counter() - began, _cpu_s() - used))
                    sent += said.split()[:1] if name in ("submitit", "sbatch alone") else []
        finally:
            sent += [one.job for one in submission.list_submissions(workspace) if one.job]
            subprocess.run(["scancel", *sent], check=True)
    print(f"median of {given.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for name, pairs in took.items():
        seconds, cpu_s = zip(*pairs, strict=True)
        print(
            f"{name:20} {statistics.median(seconds):6.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})"
            f"  {statistics.median(cpu_s):6.3f} CPU s"
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
