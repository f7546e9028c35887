"""Estimates how long runs take, by earlier runs, predictions or time limits; their GPU hours; and the time limit to propose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.cell_sizes import format_seconds
from shardlab.matrix.retry import Retry
from shardlab.runs.prediction import Prediction
from shardlab.terminal.notation import format_amount

# The time limit that is proposed for a run: a quarter longer than its time, because runs of one cell differ (assumed), and a
# multiple of five minutes.
LIMIT_MARGIN, LIMIT_ROUNDING_S = 1.25, 300
TimeSource = Literal["recorded times", "predictions", "time limits"]


class MostRetries(msgspec.Struct, frozen=True):
    """How often a run may at most be started again by itself, in all states together."""

    by_matrix: int = 0
    """As often as the numbers of the key `retry` of the matrix allow."""
    by_cluster: int = 0
    """How often more `slurm.requeue` allows, in states for which `retry` has no number."""


class RunTime(msgspec.Struct, frozen=True):
    """How long a run of a cell takes."""

    seconds: float
    """The estimated time in seconds."""
    source: TimeSource
    """recorded times: the mean of the runs of the cell that completed. predictions: the high end of the predicted time, but not
    more than the time limit. time limits: an upper bound."""
    limit_s: int | None = None
    """The time limit in seconds that is proposed for the run; null if only the present limit is known."""


class CellHours(msgspec.Struct, frozen=True):
    """The GPU hours of the runs of one cell."""

    cell: AnyCell
    run_time: RunTime | None
    """How long a run takes; None: not known."""
    occupied_gpus: int
    """The number of GPUs that all runs of the cell occupy, if they run at the same time."""
    most_retries: MostRetries = MostRetries()

    @property
    def total_gpu_hours(self) -> float:
        """The GPU hours of all runs of the cell; 0 if their time is not known."""
        return 0.0 if self.run_time is None else self.occupied_gpus * self.run_time.seconds / 3600


class GpuHours(msgspec.Struct, frozen=True):
    """The GPU hours of several cells."""

    measured: float = 0.0
    """The GPU hours of the cells that have completed in this workspace, from the recorded times of their runs."""
    predicted: float = 0.0
    """The GPU hours of the other cells whose time is predicted, from the high end of the predictions."""
    limits: float = 0.0
    """The GPU hours of the other cells, from their time limits: an upper bound."""
    unknown: int = 0
    """The number of cells for which none of these is known."""
    retries: float = 0.0
    """In addition, if runs use all retries that the key `retry` of the matrix allows."""
    requeues: float = 0.0
    """In addition, if runs use all further restarts that `slurm.requeue` allows."""

    @property
    def without_retries(self) -> float:
        """The GPU hours if no run is started again."""
        return self.measured + self.predicted + self.limits

    @property
    def submitted(self) -> float:
        """The GPU hours that `--max-gpu-hours` bounds: those without retries, and the retries that the matrix allows."""
        return self.without_retries + self.retries


def count_most_retries(cell: AnyCell, retry_keys: Retry, most_requeues: int, *, on_slurm: bool) -> MostRetries:
    """How often a run of a cell may at most be started again by itself.

    A run is not started again after a state that its cell expects, after `timeout` only if it saves checkpoints, and after
    `preempted` only on Slurm. most_requeues: `slurm.requeue` of the cluster file; 0 on other schedulers.
    """
    impossible_states = {"preempted", *cell.expect}  # on Slurm, preempted has no number of its own: it shares that of node_fail
    if on_slurm and "node_fail" in cell.expect and "preempted" not in cell.expect:
        impossible_states.remove("preempted")
    if cell.instruments.checkpoints is None:
        impossible_states.add("timeout")
    retried_states = [state for state in Retry.__struct_fields__ if state not in impossible_states]
    matrix_retries, total_retries = (
        sum(retry_keys.find_retry_limit(state, other_limit, on_slurm=on_slurm) for state in retried_states)
        for other_limit in (0, most_requeues)
    )
    return MostRetries(matrix_retries, total_retries - matrix_retries)


def estimate_run_time(
    recorded_s: float | None, cell_prediction: Prediction | None, limit_s: float | None, elapsed_s: float = 0.0
) -> RunTime | None:
    """How long a run takes; None if it is not known. Plans, --max-gpu-hours and the lease all use this estimate.

    recorded_s: the mean seconds of the completed runs of its cell. cell_prediction: the prediction of a run. limit_s: its time
    limit in seconds. Each is None if it is not known. elapsed_s: the seconds for which the run has been running; an estimate
    that is already over is not used.
    """
    predicted_s = cell_prediction.time_s.high if cell_prediction is not None and cell_prediction.time_s is not None else None
    best_known_s = recorded_s if recorded_s is not None else predicted_s
    proposed_s = None if best_known_s is None else math.ceil(best_known_s * LIMIT_MARGIN / LIMIT_ROUNDING_S) * LIMIT_ROUNDING_S
    capped_s = None if predicted_s is None else min(predicted_s, limit_s or predicted_s)
    for source, estimated_s in zip(get_args(TimeSource), (recorded_s, capped_s, limit_s), strict=True):
        if estimated_s is not None and estimated_s > elapsed_s:
            return RunTime(estimated_s, source, proposed_s)
    return None


def estimate_cell_hours(
    cells: Sequence[AnyCell],
    run_count_by_cell: Mapping[str, int],
    recorded_s_by_cell: Mapping[str, float],
    prediction_by_cell: Mapping[str, Prediction],
    cluster: Cluster,
    retries_by_cell: Mapping[str, MostRetries] | None = None,
) -> list[CellHours]:
    """The GPU hours of each cell.

    run_count_by_cell: the number of runs of a cell, by the name of the cell. recorded_s_by_cell: the mean seconds of a run, by
    the name of the cell. prediction_by_cell: the predictions, by the name of the cell. cluster: the cluster, whose time limit
    is used for cells without an own limit. retries_by_cell: how often a run may be started again, by the name of the cell;
    None: never.
    """
    cell_hours = []
    for cell in cells:
        cell_name, limit_s = cell.name(), cell.time_limit_s or (cluster.slurm.time_s if cluster.slurm is not None else None)
        run_time = estimate_run_time(recorded_s_by_cell.get(cell_name), prediction_by_cell.get(cell_name), limit_s)
        occupied_gpus = run_count_by_cell.get(cell_name, 0) * count_occupied_gpus(cell, cluster)
        cell_hours.append(CellHours(cell, run_time, occupied_gpus, (retries_by_cell or {}).get(cell_name, MostRetries())))
    return cell_hours


def count_occupied_gpus(cell: AnyCell, cluster: Cluster) -> int:
    """The number of GPUs that nobody else can use during a run: all GPUs of the run's nodes, unless other jobs may share the
    nodes (`exclusive: false`)."""
    if cell.launcher == "fork":
        return 0
    if cluster.provider == "local":
        return cell.gpus
    gpu_entry = cluster.select_gpu_type(cell.gpu_type).gpus
    if gpu_entry is None or not gpu_entry.per_node:
        return 0
    is_shared = cluster.slurm is not None and not cluster.slurm.exclusive
    return cell.nnodes * (math.ceil(cell.gpus / cell.nnodes) if is_shared else gpu_entry.per_node)


def sum_hours(cell_hours: Sequence[CellHours]) -> GpuHours:
    """The sum of the GPU hours of all cells, separately by the source of their times."""
    measured_hours, predicted_hours, limit_hours = (
        sum(
            hours_of_cell.total_gpu_hours
            for hours_of_cell in cell_hours
            if hours_of_cell.run_time is not None and hours_of_cell.run_time.source == source
        )
        for source in get_args(TimeSource)
    )
    return GpuHours(
        measured=measured_hours,
        predicted=predicted_hours,
        limits=limit_hours,
        unknown=sum(hours_of_cell.run_time is None for hours_of_cell in cell_hours),
        retries=sum(hours_of_cell.total_gpu_hours * hours_of_cell.most_retries.by_matrix for hours_of_cell in cell_hours),
        requeues=sum(hours_of_cell.total_gpu_hours * hours_of_cell.most_retries.by_cluster for hours_of_cell in cell_hours),
    )


def must_be_within_gpu_hours(most_hours: float, cell_hours: Sequence[CellHours]) -> None:
    """Raises InputError if the cells may take more GPU hours than `most_hours`, or if the time of a cell is not known.

    The retries that the matrix allows count, because the user asked for them and they start without a further question. The
    restarts of `slurm.requeue` do not count: the cluster file allows them for every matrix, after failures of the machines.
    """
    hours_sum = sum_hours(cell_hours)
    if hours_sum.unknown:
        raise InputError(
            f"--max-gpu-hours: of {hours_sum.unknown} cell(s), no run completed in this workspace, and neither a "
            "predicted time nor a time limit is known. Set `time_limit` in the matrix."
        )
    if hours_sum.submitted <= most_hours:
        return
    gpu_counts = sorted({hours_of_cell.cell.gpus for hours_of_cell in cell_hours}, reverse=True)
    fitting_gpu_counts = (
        gpu_count
        for gpu_count in gpu_counts
        if sum_hours([hours_of_cell for hours_of_cell in cell_hours if hours_of_cell.cell.gpus <= gpu_count]).submitted
        <= most_hours
    )
    largest_count = next(fitting_gpu_counts, None)
    fewer_gpus_hint = (
        f'--where "gpus <= {largest_count}" stays within it' if largest_count is not None else "select cells by --where EXPR"
    )
    retries_clause = f", and {format_amount(hours_sum.retries)} GPU hours more with all retries of the matrix"
    shorter_limit_hint = "a shorter `time_limit` in the matrix lowers the hours of a run without a recorded time"
    raise InputError(
        f"--max-gpu-hours {most_hours:.12g}: the runs may take "
        f"{describe_hours(hours_sum)}{retries_clause if hours_sum.retries else ''}. To submit fewer runs: "
        f"{fewer_gpus_hint}, or --repeats N; "
        f"{shorter_limit_hint}{', and smaller numbers of `retry` those of retries' if hours_sum.retries else ''}."
    )


def describe_hours(hours: GpuHours) -> str:
    """The GPU hours as text, such as `12.5 GPU hours (2.5 by recorded times, 10 by time limits)`."""
    hours_by_source = {
        "by recorded times": hours.measured,
        "by the high end of predictions": hours.predicted,
        "by time limits": hours.limits,
    }
    split_text = ", ".join(
        f"{format_amount(source_hours)} {source_phrase}"
        for source_phrase, source_hours in hours_by_source.items()
        if source_hours
    )
    unknown_clause = f"; {hours.unknown} cell(s) have no known time" if hours.unknown else ""
    return f"{format_amount(hours.without_retries)} GPU hours ({split_text}{unknown_clause})"


def describe_retries(hours: GpuHours) -> str:
    """The GPU hours with all retries as text, such as `about 36 GPU hours with all retries: 12 by retry of the matrix, 12 by
    slurm.requeue`; '' if no run may be started again."""
    hours_by_cause = {"by `retry` of the matrix": hours.retries, "by `slurm.requeue`": hours.requeues}
    split_text = ", ".join(
        f"{format_amount(cause_hours)} {cause_phrase}" for cause_phrase, cause_hours in hours_by_cause.items() if cause_hours
    )
    if not split_text:
        return ""
    return f"about {format_amount(hours.submitted + hours.requeues)} GPU hours with all retries ({split_text})"


def describe_limits(cell_hours: Sequence[CellHours]) -> str:
    """A sentence with the proposed time limits; '' if none is known."""
    limits_s = [
        hours_of_cell.run_time.limit_s
        for hours_of_cell in cell_hours
        if hours_of_cell.run_time is not None and hours_of_cell.run_time.limit_s is not None
    ]
    if not limits_s:
        return ""
    shortest_limit, longest_limit = (f'"{format_seconds(limit_s)}"' for limit_s in (min(limits_s), max(limits_s)))
    longest_limit = "" if longest_limit == shortest_limit else f" to {longest_limit}, by cell in --json"
    cells_clause = "" if len(limits_s) == len(cell_hours) else f" for {len(limits_s)} of {len(cell_hours)} cells"
    return f"proposed time_limit{cells_clause}: {shortest_limit}{longest_limit}; jobs with a short limit start sooner"
