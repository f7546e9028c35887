"""Records small traces of a GPU that have a known flaw, as data for tests: lost kernels, and a slow first launch.

    python benchmarks/gpu/flawed_traces.py --out FOLDER

Each trace is recorded by a process of its own, because CUPTI and the loading of kernels have a state per process. FLAWS.txt
says for each trace how many launches have no kernel of the same correlation, and how long the longest launch took.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

CONCURRENT_KERNEL = 10  # of CUpti_ActivityKind (cupti_activity.h)
# one-step-lost, all-lost: CUPTI records no kernels during the second step, or during any step, but records their launches.
# slow-first-launch: the first step is profiled, in which CUDA loads each kernel when it is first launched.
FLAWS = ("none", "one-step-lost", "all-lost", "slow-first-launch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flaw", choices=FLAWS, help="record only this flaw, in this process")
    arguments = parser.parse_args()
    if arguments.flaw:
        record(arguments.flaw, arguments.out / f"{arguments.flaw}.json.gz")
        return
    arguments.out.mkdir(exist_ok=True, parents=True)
    lines = [f"torch {torch.__version__}, {torch.cuda.get_device_name()}"]
    for flaw in FLAWS:
        command = [sys.executable, "-W", "ignore", __file__, "--flaw", flaw, "--out", str(arguments.out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        lines.append(f"{flaw}: {done.stdout.strip() or 'failed'} {done.stderr.strip()[-800:]}")
        print(lines[-1], flush=True)
    (arguments.out / "FLAWS.txt").write_text("\n".join(lines) + "\n")


def record(flaw: str, path: Path) -> None:
    """Profile three training steps so that the trace has the flaw. Write the trace, and print how many launches and
    kernels it has."""
    cupti = _cupti()
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 2).cuda()
    batch = torch.randn(4, 64, 256, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()

    if flaw != "slow-first-launch":
        step()
        torch.cuda.synchronize()
    plan = schedule(wait=0, warmup=0, active=3)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan) as profiler:
        for number in range(3):
            lost = flaw == "all-lost" or (flaw == "one-step-lost" and number == 1)
            if lost:
                torch.cuda.synchronize()
                cupti.cuptiActivityDisable(CONCURRENT_KERNEL)
            step()
            if lost:
                torch.cuda.synchronize()
                cupti.cuptiActivityEnable(CONCURRENT_KERNEL)
            if number < 2:
                profiler.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        text = plain.read_bytes()
    path.write_bytes(gzip.compress(text, 9, mtime=0))
    events = json.loads(text)["traceEvents"]
    kernels = {event["args"]["correlation"] for event in events if event.get("cat") == "kernel"}
    calls = [event for event in events if "LaunchKernel" in event.get("name", "") and "correlation" in event.get("args", {})]
    without = sum(event["args"]["correlation"] not in kernels for event in calls)
    longest = max((event["dur"] for event in calls), default=0)
    print(f"{len(calls)} launches, {len(kernels)} kernels, {without} launches without a kernel; longest launch {longest} us")


def _cupti() -> ctypes.CDLL:
    """The CUPTI library that torch has loaded into this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in maps if "libcupti" in line))


if __name__ == "__main__":
    main()
