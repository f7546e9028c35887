"""What a figure of merit is: a pure function with a name, a unit, a direction and a sentence that defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import polars as pl

from collect.sources.samples import Samples
from collect.sources.steps import of_world, unwatched
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


class Measured(NamedTuple):
    """What a metric sees of a run.

    steps: the timed steps that every rank recorded, one row per step and rank; warm-up is not in it.
    world: the same, one row per step (`steps.of_world`).
    samples: the telemetry, whole: a metric cuts it to the timed window itself, as counters need their neighbours.
    result: None where the run wrote none. hosts: those that it ran on, as they describe themselves.
    breakdowns: of the ranks that were profiled, where the trace is whole.
    validation: what the model knew after some of the steps, in their order.
    """

    cell: Cell
    steps: pl.DataFrame
    world: pl.DataFrame
    samples: Samples
    result: Result | None
    hosts: list[Host]
    breakdowns: Sequence[Breakdown] = ()
    validation: Sequence[ValidationRecord] = ()

    @property
    def undisturbed(self) -> pl.DataFrame:
        """The world's steps that no instrument slowed down: what is said of times is said of these."""
        return of_world(unwatched(self.steps)) if self.steps["watched"].any() else self.world


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
    so that every repeat gives the same and one of them is enough.
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


@cache
def menu() -> tuple[Metric, ...]:
    """Every metric, in the order of the files of `collect/metrics`."""
    return tuple(metric for module in registry.load_all("collect.metrics") for metric in module.METRICS)
