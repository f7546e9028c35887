"""Defines what a metric is: a pure function of records, with a name, a unit, a direction, and a definition in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec

from collect.loading.loaded_run import LoadedRun, Quantity
from shardlab import registry, run_guard
from shardlab.errors import ShardlabError
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.runs.state import JudgedState

Direction = Literal["higher is better", "lower is better", "neither"]
Argument = float | str


class MeanPair(NamedTuple):
    """The input of a metric that compares a cell with its baseline, such as the speed-up."""

    cell: AnyCell
    """The cell that is compared with `baseline`."""
    value: float
    """Mean of the compared metric over the repeats of `cell`."""
    baseline: AnyCell
    baseline_value: float
    """Mean of the compared metric over the repeats of `baseline`."""

    @property
    def scaling(self) -> str | None:
        """`strong` if the global batch sizes are equal, `weak` if the batch sizes per rank are equal, else None."""
        cell, baseline = self.cell, self.baseline
        if not isinstance(cell, Cell) or not isinstance(baseline, Cell):
            return None
        if cell.global_batch_size == baseline.global_batch_size:
            return "strong"
        return "weak" if cell.gpu_batch_size == baseline.gpu_batch_size else None


class MetricColumn(msgspec.Struct, frozen=True):
    """The column of a metric in a table of the report."""

    table: Literal["summary", "times", "memory", "sent"]
    """`collect.findings.columns` has the titles of the tables."""
    place: int
    """Columns of a table are ordered by this number."""
    heading: str
    digits: int = 4
    """Significant digits; sizes in bytes always have 3."""
    headings: dict[str, str] = {}
    """Kind -> heading if all values are of this kind; if kinds differ, each value shows its kind."""
    has_interval: bool = False
    """Whether half the width of the 95 % interval follows each value."""


EventKind = Literal[
    "compute", "collectives", "memory operations", "launched work", "allocations", "matrix products", "profiler steps"
]
WORK_KINDS: tuple[EventKind, ...] = ("compute", "collectives", "memory operations")  # idle time is the time between this work


class Reads(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a run folder from which a metric is computed. `collect explain` shows them behind a value."""

    steps: Literal["all", "timed", "undisturbed"] | None = None
    """Step records: of all steps, of the timed steps, or of the timed steps that no instrument slowed down."""
    samples: Literal["window", "before the training"] | None = None
    """Samples of telemetry: in the timed window, or before the first step, of GPUs that no process uses yet."""
    run: tuple[str, ...] = ()
    """Keys of run.json, such as `cell.precision`. A key that has a mapping or a list stands for all that is in it."""
    result: tuple[str, ...] = ()
    """Keys of result.json, such as `instruments.memory.peak_bytes`."""
    hosts: tuple[str, ...] = ()
    """Keys of env/HOST.json. `gpus.name` is the name of each GPU in the list `gpus`."""
    prediction: tuple[str, ...] = ()
    """Keys of prediction.json."""
    validation: bool = False
    """The records of the validations."""
    events: bool = False
    """The events of the run, such as the times in which it was suspended."""
    breakdown: tuple[EventKind, ...] = ()
    """Events of the traces, for the breakdowns of the ranks (`LoadedRun.breakdowns`), which can be like those of HTA."""
    trace: tuple[EventKind, ...] = ()
    """Events of the traces, for other figures, which are always exact (`LoadedRun.traces`)."""


class MetricFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is plain data of every metric, also of a metric that a workspace defines."""

    name: str
    unit: str
    direction: Direction
    definition: str
    column: MetricColumn | None = None
    """None: no table shows the metric; it is only in the exported files and in claims of studies."""
    reads: Reads | None = None
    """What the function `of_run` reads of a run. None: not declared, which only metrics of a workspace may leave out."""


class Metric(MetricFacts, frozen=True, kw_only=True):
    """A metric of a run (`of_run`), of a run and an argument (`of_run_at`), or of two cells (`of_cells`).

    If the function of a metric returns None, the value is not known. None never means 0.
    """

    of_run: Callable[[LoadedRun], Quantity | None] | None = None
    of_run_at: Callable[[LoadedRun, Any], Quantity | None] | None = None
    of_cells: Callable[[MeanPair], Quantity | None] | None = None
    compares: str = ""
    """For `of_cells`: name of the metric of a run whose values are compared."""
    argument: str = ""
    """Name of the additional argument of `of_run_at` or of the compared metric, as claims of studies give it."""
    example: Argument | None = None
    """An example of a value for `argument`, which shows its type."""
    exact: bool = False
    """Whether the value is counted or computed, so that every repeat gives the same value and one repeat is enough."""
    of_oom: bool = False
    """Whether runs that ended out of memory have the value. Other metrics are of runs that completed."""
    of_all_steps: bool = False
    """Whether the value includes steps that an instrument slowed down. Cells with different instruments are then not compared.
    """
    of_training: bool = False
    """Whether the value is what the training reached, and not what it cost. Claims may then compare cells of other work."""

    def applies_to(self, run: LoadedRun) -> bool:
        """Whether a run has ended as the metric needs it."""
        return run.verdict.state == "oom" if self.of_oom else run.completed


_workspace_metrics: list[Metric] = []  # metrics that the current workspace defines itself


def compute_quantities(run: LoadedRun) -> dict[str, Quantity]:
    """All metrics of shardlab that have a known value for this run: {name: value}, in the order of `load_metrics`.

    The values are computed once and stored in the run. `collect.reading.own_metrics` adds metrics that the workspace defines
    itself."""
    if run.quantities is None:
        values = (
            (metric.name, metric.of_run(run)) for metric in _load_shipped_metrics() if metric.of_run and metric.applies_to(run)
        )
        quantity_by_name = run_guard.run_guarded(lambda: {name: quantity for name, quantity in values if quantity is not None})
        if isinstance(quantity_by_name, ShardlabError):
            run.verdict, quantity_by_name = JudgedState("unknown", str(quantity_by_name)), {}
        run.quantities = quantity_by_name
    return run.quantities


def load_metrics() -> tuple[Metric, ...]:
    """All metrics: first those of shardlab, in the order of the files in `collect/metrics`, then those of the workspace."""
    return (*_load_shipped_metrics(), *_workspace_metrics)


def set_workspace_metrics(workspace_metrics: Sequence[Metric]) -> None:
    """Put metrics that the workspace defines at the end of `load_metrics`. They replace the metrics of an earlier call.

    workspace_metrics: the metrics without their functions, because another process computes the values.
    """
    _workspace_metrics[:] = workspace_metrics


def is_workspace_metric(metric_name: str) -> bool:
    """Whether the workspace defines the metric, as the last call of `set_workspace_metrics` says."""
    return any(metric.name == metric_name for metric in _workspace_metrics)


@cache
def _load_shipped_metrics() -> tuple[Metric, ...]:
    return tuple(metric for module in registry.load_plugins("collect.metrics") for metric in module.METRICS)
