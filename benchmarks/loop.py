"""Compares our training loop with a bare PyTorch loop that trains the same model on the same data in the same process.

    python benchmarks/loop.py [--workload gpt2-tiny] [--rounds 15] [--steps 20] [--n-embd 192] [--seq-len 128]

Prints the milliseconds per step of both loops (median over the rounds) and their ratio. The loops take turns, and the ratio is
computed for each round, so that changes in the speed of the machine affect both loops.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import small_cell
import torch
from torch.nn.functional import cross_entropy

from shardlab.matrix.cell import Cell
from shardlab.runs.record import LineWriter
from trainers import menu
from trainers.data.order import TIMED, DataOrder
from trainers.instrument import RunInstruments
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.run import loop


def cell(arguments: argparse.Namespace) -> Cell:
    return small_cell.cell(arguments.workload, arguments.n_embd, seq_len=arguments.seq_len, steps=arguments.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt2-tiny", help="a language workload (default: gpt2-tiny)")
    for name, default in (("--rounds", 15), ("--steps", 20), ("--n-embd", 192), ("--seq-len", 128)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, bare = measure(cell(arguments), arguments.rounds, Path(folder))
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
    print(f"the loop   {statistics.median(ours):.3f} ms a step")
    print(f"a bare one {statistics.median(bare):.3f} ms a step")
    print(f"ratio      {statistics.median(ratios):.4f} (of {len(ratios)} rounds the middle 80 %: {low:.4f} to {high:.4f})")


def measure(one: Cell, rounds: int, folder: Path) -> tuple[list[float], list[float]]:
    """The milliseconds per step of our loop and of the bare loop in each round. The two loops take turns in being first."""
    ranks = Ranks(Rank())
    task = menu.find_workload(one.workload).build(one, folder)
    order = DataOrder(task.source.items, one.global_batch_size, one.seed)
    torch.manual_seed(one.seed)
    engine = menu.find_strategy(one.strategy).build(one, task, ranks)
    torch.manual_seed(one.seed)
    model = task.model().to(ranks.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def with_loop(number: int) -> float:
        with LineWriter(folder / f"steps-{number}.jsonl") as lines:
            started = time.perf_counter()
            loop._run_steps(
                one, task, order, engine, ranks.device, ranks, loop.Recorder(lines), RunInstruments([], ranks.device)
            )
            return (time.perf_counter() - started) / (one.steps or 1) * 1000

    def without(_: int) -> float:
        started = time.perf_counter()
        for step in range(one.steps or 0):
            batch = task.fetch(order.list_batch_items(TIMED, step), ranks.device)
            logits = model(input_ids=batch.inputs).logits
            cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        ranks.barrier()  # waits until the device has finished the last step
        return (time.perf_counter() - started) / (one.steps or 1) * 1000

    ours, bare = [], []
    for number in range(-1, rounds):  # round -1 is warm-up
        pair = [(ours, with_loop), (bare, without)]
        for kept, run in pair if number % 2 else pair[::-1]:
            took = run(number)
            if number >= 0:
                kept.append(took)
    ranks.leave_group()
    return ours, bare


if __name__ == "__main__":
    main()
