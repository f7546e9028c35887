"""Measures how long the rehearsal of one cell takes and how much memory it needs: LLaMA 7B with FSDP2 on 512 ranks.

python benchmarks/rehearsal.py [--workload llm-7b --strategy fsdp2 --gpus 512 --full-depth]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from support_planner import ADAMW, cell

from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import RehearsalRequest, Rehearsed

SAMPLE_S = 0.2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workload", default="llm-7b")
    options.add_argument("--strategy", default="fsdp2")
    options.add_argument("--gpus", type=int, default=512)
    options.add_argument("--checkpointing", default="none", help="activation_checkpointing of the cell")
    options.add_argument("--full-depth", action="store_true")
    given = options.parse_args()
    asked = cell(
        given.workload, given.strategy, given.gpus, nnodes=-(-given.gpus // 8), precision="bf16", optimizer=ADAMW,
        activation_checkpointing=given.checkpointing,
    )  # fmt: skip
    depth = ["--full-depth"] if given.full_depth else []
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "trainers", "rehearse", "-", *depth],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(RehearsalRequest(asked)))
    process.stdin.close()
    most = 0
    while process.poll() is None:
        most = max(most, _memory(process.pid))
        time.sleep(SAMPLE_S)
    wall, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = rehearsed.decode_answer(process.stdout.read())
    assert isinstance(answer, Rehearsed), answer.why
    depths = "its own depth" if answer.depths is None else f"{answer.depths[0]} and {answer.depths[1]} blocks"
    print(
        f"{given.workload}, {given.strategy}, {given.gpus} ranks, {depths}: "
        f"{answer.worst_rank.peak_bytes / 2**30:.2f} GiB a rank"
    )
    print(f"{wall:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU time, {most / 2**30:.2f} GiB")


def _memory(group: int) -> int:
    """Bytes of memory of all processes of a process group; memory that they share counts once (PSS)."""
    found = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group and (
                size := re.search(r"(?m)^Pss: +(\d+)", (folder / "smaps_rollup").read_text())
            ):
                found += int(size[1]) * 1024
    return found


if __name__ == "__main__":
    main()
