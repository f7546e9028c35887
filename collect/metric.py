"""What a figure of merit is: a pure function with a name, a unit, a direction and a sentence that defines it."""

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
    """A number with its unit. kind: which of the things that a metric may mean this one is, such as `rss`."""

    value: float
    unit: str
    kind: str = ""


class Measured(msgspec.Struct, frozen=True, dict=True):
    """What a metric sees of a run.

    steps: the timed steps that every rank recorded, one row per step and rank; warm-up is not in it.
    world: the same, one row per step (`steps.of_world`).
    samples: the telemetry, whole: a metric cuts it to the timed window itself, as counters need their neighbours.
    result: None where the run wrote none. hosts: those that it ran on, as they describe themselves.
    breakdowns: of the ranks that were profiled, where the trace is whole.
    validation: what the model knew after some of the steps, in their order.
    paused: it stood still on the way, so that nothing is said of the time from one step to a later one.
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
    """What a metric sees of a run of this cell: no telemetry of a resumed one, which covers only a part of it."""
    seen = samples.frames({}) if result is not None and result.resumed else sampled
    return Measured(cell, steps.timed, steps.world, seen, result, hosts, breakdowns, validation, paused)


class Compared(NamedTuple):
    """What a metric sees of a cell beside another, its baseline: of both the metric that it compares, as means over repeats."""

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
    """A figure of merit of a run (`of_run`), of a run and an argument (`of_run_at`), or of a cell beside another (`of_cells`).

    None is unknown, never 0. compares: the metric of a run that `of_cells` sets side by side. argument: what claims call that
    which `of_run_at`, or the metric that is compared, needs besides; example: one, of its type. exact: counted or computed,
    so that every repeat gives the same and one of them is enough. of_all_steps: it also holds the steps that an instrument
    looked into, which are slower, so that no choice is made by it among cells with different instruments.
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
