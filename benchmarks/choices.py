"""Measures how long the choice of the best cell takes, and how often the choice is wrong.

    python benchmarks/choices.py

First, the seconds of CPU time to rank cells with 3 repeats and 5 metrics. Then, the choice among equal cells, whose repeats are
drawn from one normal distribution: how often one cell is called the best, and how often at least one cell is distinguished from
the first cell. Both are errors, because the cells are equal.
"""

from __future__ import annotations

import argparse
import random
import time

import msgspec

from collect.choices.family import choose_strategies
from collect.choices.standing import CRITERIA, rank_cells
from collect.findings.row import CellRow, RunRow
from collect.findings.statistics import estimate_mean
from collect.reading.load import LoadedMatrix
from collect.verdicts.selection import Measurements
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Expansion

STRATEGIES = ("single", "ddp", "fsdp1-full-shard", "fsdp2", "zero1", "zero2", "zero3", "tp", "pp-1f1b", "ps-sync")
PROVEN = SameWork(verdict="proven", why="")
NOTHING = LoadedMatrix(Expansion(schema=1, name="m", title="", path="", cells=[], excluded=[]), [])


def cell(strategy: str, gpus: int, batch: int) -> Cell:
    return Cell(
        workload="gpt2-tiny", strategy=strategy, gpus=gpus, dp=gpus, global_batch_size=8 * batch, micro_batch_size=batch,
        gradient_accumulation_steps=8 // gpus, seq_len=64, steps=10, optimizer=Optimizer("sgd", 0.1),
    )  # fmt: skip


def row(name: str, what: Cell, metrics: tuple[str, ...], repeats: int, luck: random.Random) -> CellRow:
    values = {metric: [luck.gauss(100, 1) for _ in range(repeats)] for metric in metrics}
    runs = [
        RunRow(f"{name}-r{repeat}", repeat, 1, "completed", "", {metric: known[repeat] for metric, known in values.items()})
        for repeat in range(repeats)
    ]
    estimates = {metric: estimate_mean(known, "") for metric, known in values.items()}
    return CellRow(name, msgspec.to_builtins(what), repeats, {"completed": repeats}, True, PROVEN, None, estimates, runs)


def cost(cells: int) -> float:
    luck = random.Random(1)
    rows = []
    for place in range(cells):
        strategy, gpus = STRATEGIES[place % 10], (1, 2, 4, 8)[place // 10 % 4]
        rows.append(row(f"cell {place}", cell(strategy, gpus, 1 + place // 40), CRITERIA, 3, luck))
    measurements = Measurements(NOTHING, rows)
    begun = time.process_time()
    choose_strategies(measurements)
    return time.process_time() - begun


def errors(cells: int, repeats: int, rounds: int) -> tuple[float, float]:
    """How often equal cells are wrongly judged to be different, in percent of the rounds.

    Returns (rounds in which one cell is called the best, rounds in which at least one cell is distinguished from the first
    cell).
    """
    luck = random.Random(3)
    best = apart = 0
    for number in range(rounds):
        rows = [row(f"{place} {number}", cell(STRATEGIES[place], 2, 1), CRITERIA[:1], repeats, luck) for place in range(cells)]
        (found,) = rank_cells(Measurements(NOTHING, rows), rows)
        best += found.word == "best"
        apart += len(found.best) < cells
    return 100 * best / rounds, 100 * apart / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[1000, 3334, 10_000])
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    print("cells  s of CPU")
    for cells in arguments.cells:
        print(f"{cells:5}  {cost(cells):8.2f}")
    print("\nequal cells  repeats  one named the best (%)  any told from the first (%)")
    for cells in (2, 3, 7):
        for repeats in (3, 5):
            best, apart = errors(cells, repeats, arguments.rounds)
            print(f"{cells:11}  {repeats:7}  {best:22.1f}  {apart:27.1f}")


if __name__ == "__main__":
    main()
