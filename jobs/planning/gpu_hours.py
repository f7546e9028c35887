"""Estimates the GPU hours of runs: from recorded times if the cell has completed in this workspace, else from time limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.matrix.cell import Cell
from shardlab.matrix.retry import Retry


class MostRetries(msgspec.Struct, frozen=True):
    """How often a run may at most be started again by itself, in all states together."""

    matrix: int = 0
    """As often as the numbers of the key `retry` of the matrix allow."""
    cluster: int = 0
    """How often more `slurm.requeue` allows, in states for which `retry` has no number."""


class CellHours(msgspec.Struct, frozen=True):
    """The GPU hours of the runs of one cell."""

    cell: Cell
    hours: float | None
    """The GPU hours of all runs of the cell; None if neither a recorded time nor a time limit is known."""
    measured: bool
    """Whether the time is recorded; a time limit is an upper bound."""
    retries: float = 0.0
    """Of all retries that the matrix allows, each up to its time limit."""
    requeues: float = 0.0
    """Of all further restarts that `slurm.requeue` allows, each up to its time limit."""


class GpuHours(msgspec.Struct, frozen=True):
    """The GPU hours of several cells."""

    measured: float
    """The GPU hours of the cells that have completed in this workspace, from the recorded times of their runs."""
    limits: float
    """The GPU hours of the other cells, from their time limits: an upper bound."""
    unknown: int
    """The number of cells for which neither is known."""
    retries: float = 0.0
    """In addition, if runs use all retries that the key `retry` of the matrix allows, each up to its time limit"""
    requeues: float = 0.0
    """In addition, if runs use all further restarts that `slurm.requeue` allows, each up to its time limit"""

    @property
    def submitted(self) -> float:
        """The GPU hours that `--max-gpu-hours` bounds: those without retries, and the retries that the matrix allows."""
        return self.measured + self.limits + self.retries


def count_most_retries(cell: Cell, retry: Retry, requeues: int, *, on_slurm: bool) -> MostRetries:
    """How often a run of a cell may at most be started again by itself.

    A run is not started again after a state that its cell expects, after `timeout` only if it saves checkpoints, and after
    `preempted` only on Slurm. requeues: `slurm.requeue` of the cluster file; 0 on other schedulers.
    """
    impossible_states = {"preempted", *cell.expect}  # on Slurm, preempted has no number of its own: it shares that of node_fail
    if on_slurm and "node_fail" in cell.expect and "preempted" not in cell.expect:
        impossible_states.remove("preempted")
    if cell.instruments.checkpoints is None:
        impossible_states.add("timeout")
    states = [state for state in Retry.__struct_fields__ if state not in impossible_states]
    of_matrix, total = (
        sum(retry.retry_limit(state, others, on_slurm=on_slurm) for state in states) for others in (0, requeues)
    )
    return MostRetries(of_matrix, total - of_matrix)


def estimate_cell_hours(
    cells: Sequence[Cell],
    runs: Mapping[str, int],
    recorded: Mapping[str, float],
    cluster: Cluster,
    retries: Mapping[str, MostRetries] | None = None,
) -> list[CellHours]:
    """The GPU hours of each cell.

    runs: the number of runs of a cell, by the name of the cell. recorded: the mean seconds of a run, by the name of the cell.
    cluster: the cluster, whose time limit is used for cells without an own limit.
    retries: how often a run may be started again, by the name of the cell; None: never. A retry counts with its time limit,
    because a run that fails may take longer than runs that completed; without a time limit, it counts with the recorded time.
    """
    hours = []
    for cell in cells:
        limit_s = cell.time_limit_s or (cluster.slurm.time_s if cluster.slurm is not None else None)
        seconds = recorded.get(cell.name(), limit_s)
        gpus = runs.get(cell.name(), 0) * count_occupied_gpus(cell, cluster)
        cell_retries = (retries or {}).get(cell.name(), MostRetries())
        longest_s = limit_s or seconds or 0.0
        of_retries, of_requeues = (times * gpus * longest_s / 3600 for times in (cell_retries.matrix, cell_retries.cluster))
        gpu_hours = None if seconds is None else gpus * seconds / 3600
        hours.append(CellHours(cell, gpu_hours, cell.name() in recorded, of_retries, of_requeues))
    return hours


def count_occupied_gpus(cell: Cell, cluster: Cluster) -> int:
    """The number of GPUs that nobody else can use during a run: all GPUs of the run's nodes, unless other jobs may share the
    nodes (`exclusive: false`)."""
    if cell.launcher == "fork":
        return 0
    if cluster.provider == "local":
        return cell.gpus
    gpus = cluster.for_gpu_type(cell.gpu_type).gpus
    if gpus is None or not gpus.per_node:
        return 0
    shared = cluster.slurm is not None and not cluster.slurm.exclusive
    return cell.nnodes * (math.ceil(cell.gpus / cell.nnodes) if shared else gpus.per_node)


def sum_hours(hours: Sequence[CellHours]) -> GpuHours:
    """The sum of the GPU hours of all cells, separately for cells with recorded times and for cells with time limits."""
    return GpuHours(
        measured=sum(entry.hours for entry in hours if entry.hours is not None and entry.measured),
        limits=sum(entry.hours for entry in hours if entry.hours is not None and not entry.measured),
        unknown=sum(entry.hours is None for entry in hours),
        retries=sum(entry.retries for entry in hours),
        requeues=sum(entry.requeues for entry in hours),
    )


def must_be_within_bound(bound: float, hours: Sequence[CellHours]) -> None:
    """Raises InputError if the cells may take more GPU hours than `bound`, or if the time of a cell is not known.

    The retries that the matrix allows count, because the user asked for them and they start without a further question. The
    restarts of `slurm.requeue` do not count: the cluster file allows them for every matrix, after failures of the machines.
    """
    estimate = sum_hours(hours)
    if estimate.unknown:
        raise InputError(
            f"--max-gpu-hours: of {estimate.unknown} cell(s), no run completed in this workspace and no time limit is known. "
            "Set `time_limit` in the matrix."
        )
    if estimate.submitted <= bound:
        return
    sizes = sorted({entry.cell.gpus for entry in hours}, reverse=True)
    fitting = (size for size in sizes if sum_hours([entry for entry in hours if entry.cell.gpus <= size]).submitted <= bound)
    largest = next(fitting, None)
    fewer = f'--where "gpus <= {largest}" stays within it' if largest is not None else "select cells by --where EXPR"
    retried = f", and {estimate.retries:.3g} GPU hours more with all retries of the matrix" if estimate.retries else ""
    shorter = "a shorter `time_limit` in the matrix lowers the hours of a run without a recorded time"
    raise InputError(
        f"--max-gpu-hours {bound:g}: the runs may take {describe_hours(estimate)}{retried}. To submit fewer runs: {fewer}, or "
        f"--repeats N; {shorter}{', and smaller numbers of `retry` those of retries' if estimate.retries else ''}."
    )


def describe_hours(hours: GpuHours) -> str:
    """The GPU hours as text, such as `12.5 GPU hours (2.5 by recorded times, 10 by time limits)`."""
    parts = {"by recorded times": hours.measured, "by time limits": hours.limits}
    split = ", ".join(f"{value:.3g} {name}" for name, value in parts.items() if value)
    unknown = f"; {hours.unknown} cell(s) have no known time" if hours.unknown else ""
    return f"{hours.measured + hours.limits:.3g} GPU hours ({split}{unknown})"


def describe_retries(hours: GpuHours) -> str:
    """The GPU hours with all retries as text, such as `up to 36 GPU hours with all retries: 12 by retry of the matrix, 12 by
    slurm.requeue`; '' if no run may be started again."""
    parts = {"by `retry` of the matrix": hours.retries, "by `slurm.requeue`": hours.requeues}
    split = ", ".join(f"{value:.3g} {name}" for name, value in parts.items() if value)
    return f"up to {hours.submitted + hours.requeues:.3g} GPU hours with all retries ({split})" if split else ""
