"""Measures how long the planner needs to predict 10,000 cells by formula. It needs neither a GPU nor torch.

python benchmarks/planner.py [--cells N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from support_planner import cell

from jobs.planner import gpu, link, predict
from jobs.planner.machine import PlannedMachine

STRATEGIES = ("ddp", "fsdp2", "fsdp1-shard-grad-op", "zero2", "zero3", "tp", "pp-1f1b", "pp-gpipe")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", type=int, default=10_000)
    count = options.parse_args().cells
    known = gpu.must_find_gpu_model("a100-80gb")
    machine = PlannedMachine(
        True, "a100-80gb", known, gpu.find_gpu_memory(known, None), link.make_data_sheet_link(known), None, 2.0
    )
    kinds = []
    for strategy in STRATEGIES:
        degrees = {"tp": 4} if strategy == "tp" else {"pp": 4, "passes": 16} if strategy.startswith("pp") else {}
        kinds += [cell(name, strategy, 4, precision="bf16", **degrees) for name in ("gpt2", "gpt2-large", "llm-1.3b", "llm-7b")]
    cells = [msgspec.structs.replace(kinds[number % len(kinds)], seed=number) for number in range(count)]
    began, began_cpu = time.perf_counter(), time.process_time()
    found = [predict.predict_run(one, machine) for one in cells]
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    assert all(one.step_s is not None for one in found)
    print(f"{count:,} cells: {wall:.1f} s, {cpu:.1f} s of CPU time")


if __name__ == "__main__":
    main()
