"""Measures the CPU time of the telemetry sampler, in percent of one core, at several rates and with eight fake GPUs.

    python benchmarks/sampler.py [--hz 1 10 50] [--seconds 20] [--gpus 8] [--rounds 3]

The GPUs are imitated by a stub of NVML's library (tests/support/stub_nvml), which is compiled with g++ and answers at once. So
only the cost of our own code is measured, without the time that a real driver needs for its answers. The CPU time is read from
the kernel (/proc/PID/schedstat) in the middle of the run, so that the start of Python does not count."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUB = Path(__file__).parents[1] / "tests" / "support" / "stub_nvml" / "nvml.cpp"
ANSWERS = (
    "power_mw=300000 energy_mj=1 reasons=0 utilization=90 memory_total=85899345920 memory_used=64424509440 temperature=60 "
    "sm_clock=1980 memory_clock=2619 pcie_tx=1 pcie_rx=1 nvlink_tx_kib=1 nvlink_rx_kib=1 ecc_corrected=0 ecc_uncorrected=0"
)


def stub(folder: Path, gpus: int) -> dict[str, str]:
    """Compile the stub of NVML. Returns the environment variables with which a process sees this number of GPUs."""
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", str(STUB), "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(command, check=True)
    (folder / "gpus.txt").write_text("\n".join(f"gpu uuid=GPU-{number} {ANSWERS}" for number in range(gpus)))
    return {"LD_LIBRARY_PATH": str(folder), "STUB_NVML": str(folder / "gpus.txt")}


def on_processor_s(pid: int) -> float:
    """The processor time of a process so far, in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def cost_pct(out: Path, hz: float, seconds: float, variables: dict[str, str]) -> tuple[float, float]:
    """Run a sampler at the rate `hz`. Returns (its processor time in percent of one core, its samples per second)."""
    command = [sys.executable, "-m", "collect", "sample", "--out", str(out), "--hz", str(hz)]
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        while not out.exists() or out.read_bytes().count(b"\n") < 2:
            if process.poll() is not None:
                raise SystemExit(f"the sampler ended with code {process.returncode}")
            time.sleep(0.01)
        before, lines, began = on_processor_s(process.pid), out.read_bytes().count(b"\n"), time.monotonic()
        time.sleep(seconds)
        used, passed = on_processor_s(process.pid) - before, time.monotonic() - began
        return 100 * used / passed, (out.read_bytes().count(b"\n") - lines) / passed
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print a line for each rate, with the median over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hz", type=float, nargs="+", default=[1, 10, 50])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = stub(folder, given.gpus)
        for hz in given.hz:
            outs = [folder / f"{hz:g}-{turn}.jsonl" for turn in range(given.rounds)]
            found = [cost_pct(out, hz, given.seconds, variables) for out in outs]
            size = statistics.median(len(out.read_bytes()) / out.read_bytes().count(b"\n") for out in outs)
            share, rate = (statistics.median(values) for values in zip(*found, strict=True))
            print(
                f"{given.gpus} GPUs at {hz:g} Hz  {share:6.3f} % of a core  {10 * share / rate:6.3f} ms a sample  "
                f"{rate:6.2f} samples a second  {size:6.0f} bytes a sample"
            )


if __name__ == "__main__":
    main()
