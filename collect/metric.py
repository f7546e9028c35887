"""Defines a metric: a pure function with a name, a unit, a direction and a sentence that defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import polars as pl

from collect.sources import samples
from collect.sources.samples import Interface, Samples, Seen, of_interfaces
from collect.sources.steps import Frames, undisturbed, window
from shardlab import registry
from shardlab.cell import Cell
from shardlab.host import Host
from shardlab.record import Result, ValidationRecord

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown

Direction = Literal["higher is better", "lower is better", "neither"]
Argument = float | str


class Quantity(msgspec.Struct, frozen=True):
    """A number with its unit. kind: what was measured, if a metric can be measured in several ways, such as `counter`."""

    value: float
    unit: str
    kind: str = ""


class Measured(msgspec.Struct, frozen=True, dict=True):
    """The input of a metric: one run.

    steps: the timed steps that every rank recorded, one row per step and rank, without warm-up.
    world: the same steps, one row per step (`steps.of_world`).
    samples: the complete telemetry. A metric selects the timed window itself, because counters need the samples around it.
    result: None if the run wrote no result. hosts: the descriptions of the hosts that the run was on.
    breakdowns: of the profiled ranks whose trace is complete.
    validation: the validation records, in the order of their steps.
    paused: the run was suspended between its timed steps, so the time from one step to a later step is not meaningful.
    """

    cell: Cell
    steps: pl.DataFrame
    world: pl.DataFrame
    samples: Samples
    result: Result | None
    hosts: list[Host]
    breakdowns: Sequence[Breakdown] = ()
    validation: Sequence[ValidationRecord] = ()
    paused: bool = False

    @cached_property
    def window(self) -> tuple[float, float] | None:
        """(first, last) wall_s of the timed steps (`steps.window`)."""
        return window(self.steps)

    @cached_property
    def gpus(self) -> pl.DataFrame:
        """The samples of the GPUs that the ranks trained on. If the result is of an older release and does not name these GPUs:
        the samples of all GPUs of the hosts."""
        used = self.result.gpus if self.result else None
        return self.samples.gpus if used is None else self.samples.gpus.filter(pl.col("uuid").is_in(used))

    @cached_property
    def interfaces(self) -> dict[Interface, list[Seen]]:
        """The samples of each network interface."""
        return of_interfaces(self.samples.nics)

    @cached_property
    def undisturbed(self) -> pl.DataFrame:
        """The world's steps that no instrument slowed down: what is said of times is said of these."""
        return undisturbed(self.steps, self.world)


def measured(
    cell: Cell,
    steps: Frames,
    sampled: Samples,
    result: Result | None,
    hosts: list[Host],
    validation: Sequence[ValidationRecord],
    breakdowns: Sequence[Breakdown] = (),
    *,
    paused: bool,
) -> Measured:
    """The input of a metric for a run of this cell. A resumed run gets no telemetry, because its telemetry is not complete."""
    seen = samples.frames({}) if result is not None and result.resumed else sampled
    return Measured(cell, steps.timed, steps.world, seen, result, hosts, breakdowns, validation, paused)


class Compared(NamedTuple):
    """The input of a metric that compares a cell with its baseline: for both the mean of the compared metric over repeats."""

    cell: Cell
    value: float
    baseline: Cell
    baseline_value: float

    @property
    def scaling(self) -> str | None:
        """`strong` where both train the same global batch, `weak` where both give a rank the same, else None."""
        if self.cell.global_batch_size == self.baseline.global_batch_size:
            return "strong"
        return "weak" if self.cell.gpu_batch_size == self.baseline.gpu_batch_size else None


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a run (`of_run`), of a run and an argument (`of_run_at`), or of two cells (`of_cells`).

    A result of None means unknown, never 0. compares: the metric of a run that `of_cells` compares. argument: the name by which
    claims give the additional argument of `of_run_at` or of the compared metric; example: a value of the right type. exact:
    counted or computed, so every repeat gives the same value and one repeat is enough. of_all_steps: includes the slower steps
    that an instrument observed, so the metric does not decide a choice among cells with different instruments.
    """

    name: str
    unit: str
    direction: Direction
    definition: str
    of_run: Callable[[Measured], Quantity | None] | None = None
    of_run_at: Callable[[Measured, Any], Quantity | None] | None = None
    of_cells: Callable[[Compared], Quantity | None] | None = None
    compares: str = ""
    argument: str = ""
    example: Argument | None = None
    exact: bool = False
    of_all_steps: bool = False


def quantities(run: Measured) -> dict[str, Quantity]:
    """Every metric of a run that is known, by name, in the order of the menu."""
    asked = ((metric.name, metric.of_run(run)) for metric in menu() if metric.of_run)
    return {name: found for name, found in asked if found is not None}


@cache
def menu() -> tuple[Metric, ...]:
    """Every metric, in the order of the files of `collect/metrics`."""
    return tuple(metric for module in registry.load_all("collect.metrics") for metric in module.METRICS)
