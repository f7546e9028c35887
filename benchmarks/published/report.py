"""Prints how predictions compare with published measurements: time by table and program, memory, fits, and pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import mean, median

import msgspec
from planned_rows import PlannedRow

PAIR_SHARE = 1.05  # two runs of a job form a pair if one is at least this many times as fast as the other


class TimeErrors(msgspec.Struct, frozen=True):
    """How the predicted times of some rows compare with the measured ones."""

    count: int
    median_error: float
    mean_error: float
    bias: float
    """Median of predicted divided by measured: above 1, predictions are too slow."""
    inside: float
    """The share of measurements inside the predicted range."""
    width: float
    """Median of the high end of the range divided by its low end."""


class StrategyPair(msgspec.Struct, frozen=True):
    """Two rows of one job, the faster one first."""

    faster: PlannedRow
    slower: PlannedRow

    @property
    def in_order(self) -> bool:
        """Whether the faster row is predicted to be faster."""
        return predicted_s(self.faster) < predicted_s(self.slower)


def predicted_s(item: PlannedRow) -> float:
    """The likely predicted time of a step."""
    assert item.predicted.step_s is not None
    return item.predicted.step_s.likely


def measured_s(item: PlannedRow) -> float:
    """The measured time of a step."""
    measured = item.row.measured_step_s
    assert measured is not None
    return measured


def with_time(items: Iterable[PlannedRow]) -> list[PlannedRow]:
    """The rows with a measured and a predicted time, without those that constants of the planner are from."""
    return [item for item in items if item.time_ratio is not None and item.row.used_in is None]


def measure_errors(items: Sequence[PlannedRow]) -> TimeErrors:
    """The errors of rows that have a time; at least one row."""
    ratios = [item.time_ratio for item in items if item.time_ratio is not None]
    errors = [abs(ratio - 1) for ratio in ratios]
    ranges = [item.predicted.step_s for item in items if item.predicted.step_s is not None]
    return TimeErrors(
        count=len(errors),
        median_error=median(errors),
        mean_error=mean(errors),
        bias=median(ratios),
        inside=mean(item.time_inside for item in items),
        width=median(span.high / span.low for span in ranges),
    )


def group_by(items: Iterable[PlannedRow], attribute: str) -> dict[str, list[PlannedRow]]:
    """Rows by `table` or `program`, in their order."""
    groups: dict[str, list[PlannedRow]] = defaultdict(list)
    for item in items:
        groups[item.row.program if attribute == "program" else item.row.table.name].append(item)
    return groups


def find_pairs(items: Iterable[PlannedRow]) -> list[StrategyPair]:
    """All pairs of rows of one job whose measured times differ by 5 % or more."""
    by_job: dict[str, list[PlannedRow]] = defaultdict(list)
    for item in with_time(items):
        by_job[item.row.job].append(item)
    ordered = (sorted(pair, key=measured_s) for job in by_job.values() for pair in combinations(job, 2))
    return [StrategyPair(fast, slow) for fast, slow in ordered if measured_s(slow) >= PAIR_SHARE * measured_s(fast)]


def print_times(items: Sequence[PlannedRow]) -> None:
    """Print the errors of the times by table and by program, and their medians."""
    timed = with_time(items)
    print(f"{'':46}  rows  median error  mean error   bias  inside  width")
    for attribute in ("table", "program"):
        print(f"by {attribute}")
        for name, group in group_by(timed, attribute).items():
            _print_errors(f"  {name}", measure_errors(group))
    _print_errors("all rows", measure_errors(timed))
    programs = [measure_errors(group).median_error for group in group_by(timed, "program").values()]
    print(f"median over programs of the program's median error: {median(programs):.1%}")


def _print_errors(name: str, errors: TimeErrors) -> None:
    print(
        f"{name[:46]:46}  {errors.count:4}  {errors.median_error:12.1%}  {errors.mean_error:10.1%}  {errors.bias:4.2f}x"
        f"  {errors.inside:6.0%}  {errors.width:4.2f}x"
    )


def print_memory(items: Sequence[PlannedRow]) -> None:
    """Print predicted and measured memory of each row where they are comparable."""
    compared = [item for item in items if item.memory_ratio is not None]
    errors = [abs(item.memory_ratio - 1) for item in compared if item.memory_ratio is not None]
    if not errors:
        return
    print(f"memory: {len(errors)} rows, median error {median(errors):.1%}, largest {max(errors):.1%}")
    for item in compared:
        assert item.memory_ratio is not None
        assert item.row.memory_gib is not None
        predicted_gib = item.memory_ratio * item.row.memory_gib
        print(f"  {item.row.name[:80]:80} measured {item.row.memory_gib:6.1f}  predicted {predicted_gib:6.1f} GiB")


def print_fits(items: Sequence[PlannedRow]) -> None:
    """Print the verdicts on configurations that ran, and on those that were out of memory, and name the wrong ones."""
    for ran, title, wrong in ((True, "ran", ("no", "unlikely")), (False, "out of memory", ("yes", "likely"))):
        verdicts = Counter(str(item.predicted.fits) for item in items if item.row.ran is ran)
        total = sum(verdicts.values())
        bad = [item.row.name for item in items if item.row.ran is ran and item.predicted.fits in wrong]
        shown = ", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items()))
        print(f"{title}: {shown}; wrong: {len(bad)} of {total}")
        for name in bad:
            print(f"  {name}")


def print_pairs(items: Sequence[PlannedRow], *, each: bool) -> None:
    """Print how many pairs are predicted in the right order, by program. each: also print each pair."""
    pairs = find_pairs(items)
    if not pairs:
        return
    print(f"pairs of one job that differ by 5 % or more: {_count_right(pairs)}")
    by_program: dict[str, list[StrategyPair]] = defaultdict(list)
    for pair in pairs:
        by_program[pair.faster.row.program].append(pair)
    for program, program_pairs in by_program.items():
        print(f"  {program}: {_count_right(program_pairs)}")
        for pair in program_pairs if each else ():
            gaps = [value(pair.slower) / value(pair.faster) for value in (measured_s, predicted_s)]
            print(f"    {'right' if pair.in_order else 'WRONG'} measured {gaps[0]:.2f}x predicted {gaps[1]:.2f}x", end="")
            print(f"  {pair.faster.row.name} | {pair.slower.row.name}")


def _count_right(pairs: Sequence[StrategyPair]) -> str:
    right = sum(pair.in_order for pair in pairs)
    return f"{right} of {len(pairs)} in the right order ({right / len(pairs):.0%})"


def print_rows(items: Sequence[PlannedRow]) -> None:
    """Print each row with its measured and its predicted time."""
    for item in items:
        times = ""
        if item.time_ratio is not None:
            place = "inside" if item.time_inside else "OUTSIDE"
            times = f"{measured_s(item):10.3f} {predicted_s(item):10.3f} s {item.time_ratio:5.2f}x {place:8}"
        print(f"{item.row.name[:90]:90} {times:40} {item.predicted.bottleneck or '-':14} fits {item.predicted.fits}")
