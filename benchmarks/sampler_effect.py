"""Measures whether the telemetry sampler makes training steps slower: steps with and without the sampler, in turns.

    python benchmarks/sampler_effect.py [--hz 2] [--rounds 20] [--steps 100] [--gpus 8] [--n-embd 192] [--seq-len 128]

The steps are steps of the training loop on the processor of this machine, which the sampler uses too. The sampler is the real
program with a stub in place of NVML, as in sampler.py. It takes its first sample before the steps begin. Each round has steps
with and steps without the sampler, and the two kinds take turns in being first. The ratio of a round is the median step time
with the sampler divided by the median step time without the sampler. The benchmark prints the mean of these ratios and its 95 %
interval by Student's t. If the interval contains 1, the sampler has no measurable effect.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sampler
import small_cell
import torch

from collect.findings.statistics import estimate_mean
from shardlab.runs.record import LineWriter, StepRecord, read_records
from trainers import menu
from trainers.data.order import DataOrder
from trainers.instrument import RunInstruments
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.run import loop


@contextmanager
def sampling(out: Path, hz: float, variables: dict[str, str]) -> Iterator[None]:
    """Run a sampler during the block. The block begins after the first sample."""
    command = [sys.executable, "-m", "collect", "sample", "--out", str(out), "--hz", str(hz)]
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        while not out.exists() or b"\n" not in out.read_bytes():
            if process.poll() is not None:
                raise SystemExit(f"the sampler ended with code {process.returncode}")
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print the step time with and without the sampler, and the ratio of both times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hz", type=float, default=2, help="samples per second (default: 2)")
    for name, default in (("--rounds", 20), ("--steps", 100), ("--gpus", 8), ("--n-embd", 192), ("--seq-len", 128)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds must be at least 2, because the interval is computed from the differences between rounds")
    one = small_cell.cell("gpt2-tiny", given.n_embd, seq_len=given.seq_len, steps=given.steps)
    ranks = Ranks(Rank())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = sampler.stub(folder, given.gpus)
        task = menu.find_workload(one.workload).build(one, folder)
        order = DataOrder(task.source.items, one.global_batch_size, one.seed)
        torch.manual_seed(one.seed)
        engine = menu.find_strategy(one.strategy).build(one, task, ranks)

        def step_ms(path: Path) -> float:
            with LineWriter(path) as lines:
                recorder = loop.Recorder(lines)
                loop._run_steps(one, task, order, engine, ranks.device, ranks, recorder, RunInstruments([], ranks.device))
            return statistics.median(record.step_ms for record in read_records(path, StepRecord).records)

        plain, sampled = [], []
        for number in range(-1, given.rounds):  # round -1 is warm-up
            for is_sampled in (True, False) if number % 2 else (False, True):
                path = folder / f"steps-{number}-{is_sampled}.jsonl"
                if is_sampled:
                    with sampling(folder / f"samples-{number}.jsonl", given.hz, variables):
                        took = step_ms(path)
                else:
                    took = step_ms(path)
                if number >= 0:
                    (sampled if is_sampled else plain).append(took)
    ranks.leave_group()
    logs = estimate_mean([math.log(with_it / without) for with_it, without in zip(sampled, plain, strict=True)], "")
    assert logs.low is not None
    assert logs.high is not None
    ratio, low, high = map(math.exp, (logs.value, logs.low, logs.high))
    print(f"without the sampler     {statistics.median(plain):8.3f} ms a step")
    print(f"with it, at {given.hz:4g} Hz     {statistics.median(sampled):8.3f} ms a step")
    print(f"ratio  {ratio:.4f}  (95 % interval {low:.4f} to {high:.4f}, {given.rounds} rounds of {given.steps} steps)")


if __name__ == "__main__":
    main()
