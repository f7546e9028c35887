"""Estimates the GPU hours of runs: from recorded times if the cell has completed in this workspace, else from time limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from shardlab.cell import Cell
from shardlab.cluster import Cluster
from shardlab.errors import InputError


class CellHours(msgspec.Struct, frozen=True):
    """The GPU hours of the runs of one cell."""

    cell: Cell
    hours: float | None
    """The GPU hours of all runs of the cell; None if neither a recorded time nor a time limit is known."""
    measured: bool
    """Whether `hours` comes from recorded times. If not, `hours` comes from the time limit and is an upper bound."""


class GpuHours(msgspec.Struct, frozen=True):
    """The GPU hours of several cells."""

    measured: float
    """The GPU hours of the cells that have completed in this workspace, from the recorded times of their runs."""
    limits: float
    """The GPU hours of the other cells, from their time limits: an upper bound."""
    unknown: int
    """The number of cells for which neither a recorded time nor a time limit is known."""


def of(cells: Sequence[Cell], runs: Mapping[str, int], recorded: Mapping[str, float], where: Cluster) -> list[CellHours]:
    """The GPU hours of each cell.

    runs: the number of runs of a cell, by the name of the cell. recorded: the mean seconds of a run, by the name of the cell.
    where: the cluster, whose time limit is used for cells without an own limit.
    """
    hours = []
    for cell in cells:
        limit_s = cell.time_limit_s or (where.slurm.time_s if where.slurm is not None else None)
        seconds = recorded.get(cell.name(), limit_s)
        product = None if seconds is None else runs.get(cell.name(), 0) * occupied(cell, where) * seconds / 3600
        hours.append(CellHours(cell, product, cell.name() in recorded))
    return hours


def occupied(cell: Cell, where: Cluster) -> int:
    """The number of GPUs that nobody else can use during a run: all GPUs of the run's nodes, unless other jobs may share the
    nodes (`exclusive: false`)."""
    if cell.launcher == "fork":
        return 0
    if where.provider == "local":
        return cell.gpus
    gpus = where.for_gpu_type(cell.gpu_type).gpus
    if gpus is None or not gpus.per_node:
        return 0
    shared = where.slurm is not None and not where.slurm.exclusive
    return cell.nnodes * (math.ceil(cell.gpus / cell.nnodes) if shared else gpus.per_node)


def total(hours: Sequence[CellHours]) -> GpuHours:
    """The sum of the GPU hours of all cells, separately for cells with recorded times and for cells with time limits."""
    return GpuHours(
        measured=sum(entry.hours for entry in hours if entry.hours is not None and entry.measured),
        limits=sum(entry.hours for entry in hours if entry.hours is not None and not entry.measured),
        unknown=sum(entry.hours is None for entry in hours),
    )


def must_be_within(bound: float, hours: Sequence[CellHours]) -> None:
    """Raises InputError if the cells may take more GPU hours than `bound`, or if the time of a cell is not known."""
    asked = total(hours)
    if asked.unknown:
        raise InputError(
            f"--max-gpu-hours: of {asked.unknown} cell(s), no run completed in this workspace and no time limit is known. Set "
            "`time_limit` in the matrix."
        )
    if asked.measured + asked.limits <= bound:
        return
    sizes = sorted({entry.cell.gpus for entry in hours}, reverse=True)
    fitting = (size for size in sizes if sum(entry.hours or 0.0 for entry in hours if entry.cell.gpus <= size) <= bound)
    largest = next(fitting, None)
    fewer = f'--where "gpus <= {largest}" stays within it' if largest is not None else "select cells by --where EXPR"
    raise InputError(
        f"--max-gpu-hours {bound:g}: the runs may take {in_words(asked)}. To submit fewer runs: {fewer}, or --repeats N; a "
        "shorter `time_limit` in the matrix lowers the hours of a run without a recorded time."
    )


def in_words(hours: GpuHours) -> str:
    """The GPU hours as text, such as `12.5 GPU hours (2.5 by recorded times, 10 by time limits)`."""
    parts = {"by recorded times": hours.measured, "by time limits": hours.limits}
    split = ", ".join(f"{value:.3g} {name}" for name, value in parts.items() if value)
    unknown = f"; {hours.unknown} cell(s) have no known time" if hours.unknown else ""
    return f"{hours.measured + hours.limits:.3g} GPU hours ({split}{unknown})"
