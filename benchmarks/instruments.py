"""Measures what each instrument costs: how much slower the observed steps are, and the time that it takes between steps.

    python benchmarks/instruments.py                   # a 4-layer GPT-2, 256 wide, 128 positions, 4 sequences
    python benchmarks/instruments.py --n-embd 64       # small operators: instruments that observe each operator cost most

Each round is one run in this process, and the instrument observes half of the steps of the run. The ratio of a round is the
median time of the observed steps divided by the median time of the other steps. The instrument `memory: categories` observes
only one step of a run, so the runs of this instrument have three steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import small_cell
import torch

from shardlab.matrix.cell import Cell, Instruments, Optimizer, Profile
from shardlab.runs.record import LineWriter, StepRecord, read_records
from shardlab.runs.rundir import RunDir
from trainers import menu
from trainers.data.order import DataOrder
from trainers.instrument import RunInstruments
from trainers.instruments import selection
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.run import loop

HALF = 4  # number of steps that the profiler records, after the same number of steps without the profiler
LOOKS: dict[str, Callable[[], tuple[Instruments, int]]] = {
    "nothing": lambda: (Instruments(), 2 * HALF),
    "memory: categories": lambda: (Instruments(memory="categories"), 3),
    "profile": lambda: (Instruments(profile=_profile()), 2 * HALF),
    "profile, shapes": lambda: (Instruments(profile=_profile(shapes=True)), 2 * HALF),
    "profile, shapes, stacks": lambda: (Instruments(profile=_profile(shapes=True, stacks=True)), 2 * HALF),
    "profile, memory": lambda: (Instruments(profile=_profile(memory=True)), 2 * HALF),
}


def _profile(**recorded: bool) -> Profile:
    return Profile(first_step=HALF + 1, steps=HALF, **recorded)


def cell(arguments: argparse.Namespace, look: Instruments, steps: int) -> Cell:
    return small_cell.cell(
        "gpt2-tiny",
        arguments.n_embd,
        global_batch_size=4,
        micro_batch_size=4,
        seq_len=arguments.seq_len,
        steps=steps,
        warmup_steps=2,
        optimizer=Optimizer("adamw", 1e-3),
        instruments=look,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rounds", 7), ("--n-embd", 256), ("--seq-len", 128)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    arguments = parser.parse_args()
    ranks = Ranks(Rank())
    found: dict[str, list[tuple[float, float | None, float]]] = {name: [] for name in LOOKS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, arguments.rounds):  # round -1 is warm-up: it loads the libraries of the instruments
            for name, look in LOOKS.items():
                one = measure(cell(arguments, *look()), RunDir(Path(folder) / f"{number}-{name}"), ranks, Path(folder))
                if number >= 0:
                    found[name].append(one)
    ranks.leave_group()
    print(f"{'instrument':<26}{'a step (ms)':>12}{'looked into, over it':>22}{'between steps (s)':>19}")
    for name, rounds in found.items():
        plain, cost = (statistics.median(values) for values in ([one[0] for one in rounds], [one[2] for one in rounds]))
        ratios = [ratio for _, ratio, _ in rounds if ratio is not None]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        print(f"{name:<26}{plain:>12.2f}{ratio:>22}{cost:>19.3f}")


def measure(one: Cell, run_dir: RunDir, ranks: Ranks, data: Path) -> tuple[float, float | None, float]:
    """Train one run and measure the cost of its instruments.

    Returns (the median duration in ms of the steps that no instrument observes; the median of the observed steps divided by the
    median of the steps that are not observed, or None if no step is observed; the seconds that the instruments take between
    steps).
    """
    task = menu.find_workload(one.workload).build(one, data)
    order = DataOrder(task.source.items, one.global_batch_size, one.seed)
    torch.manual_seed(one.seed)
    engine = menu.find_strategy(one.strategy).build(one, task, ranks)
    watch = RunInstruments(
        selection.create_instruments(one, task, engine, run_dir, ranks, ranks, order, may_wait=True), ranks.device
    )
    with LineWriter(run_dir.steps_file(0)) as lines:
        loop._run_steps(one, task, order, engine, ranks.device, ranks, loop.Recorder(lines), watch)
    records = [record for record in read_records(run_dir.steps_file(0), StepRecord).records if not record.warmup]
    plain = statistics.median(record.step_ms for record in records if not record.watched)
    watched = [record.step_ms for record in records if record.watched]
    return plain, statistics.median(watched) / plain if watched else None, sum(watch.cost_s.values())


if __name__ == "__main__":
    main()
