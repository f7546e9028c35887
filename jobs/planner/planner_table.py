"""Writes predictions as text: the tables of `jobs plan`, and sums over all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jobs.planner import host_memory
from jobs.planner.scale_out import ScaledCell
from shardlab.runs.prediction import PredictedRange, Prediction, sum_ranges
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.terminal.notation import format_amount
from shardlab.terminal.table import Column, Table
from shardlab.workspace import handles

GIB = 1 << 30
MOST_SHOWN_NAMES = 3  # the number of cells that a sentence about several cells names
MEMORY_SOURCE_HEADING = "memory from"  # the heading of the column that says whether a formula or a rehearsal gave the memory


def format_size(byte_count: float) -> str:
    """A number of bytes as text in GiB, such as `12.3 GiB`, or in MiB if it is below 0.1 GiB."""
    return f"{byte_count / GIB:,.1f} GiB" if byte_count >= GIB / 10 else f"{byte_count / 2**20:,.1f} MiB"


def make_predictions_table(
    predictions: Mapping[str, Prediction], handle_by_cell: Mapping[str, str]
) -> Table[tuple[str, Prediction]]:
    """The predictions of cells, by the name of the cell, without columns in which no value is known.

    handle_by_cell: the handle of each cell."""
    has_rehearsals = any(prediction.memory_from == "rehearsal" for prediction in predictions.values())
    columns = [
        column
        for column in _PREDICTION_COLUMNS
        if any(column.text(row).value for row in predictions.items())
        and (
            has_rehearsals or column.heading != MEMORY_SOURCE_HEADING
        )  # without rehearsals, it would say `formula` in every row
    ]
    handle_column: Column[tuple[str, Prediction]] = handles.make_handle_column(lambda row: handle_by_cell.get(row[0], ""))
    return Table("predicted", [handle_column, _CELL_COLUMN, *columns], list(predictions.items()))


def describe_sums(predictions: Mapping[str, Prediction], run_counts: Mapping[str, int]) -> list[str]:
    """Sentences with the predicted sums over all runs. run_counts: the number of runs of each cell, by the name of the cell."""
    sentences = []
    unfit_count, unlikely_count = (
        sum(prediction.fits == fit_verdict for prediction in predictions.values()) for fit_verdict in ("no", "unlikely")
    )
    if unfit_count:
        sentences.append(
            f"predicted: {unfit_count} of {len(predictions)} cell(s) do not fit the memory of a GPU; `jobs submit` "
            "leaves them out, unless they expect oom, or with --no-fit-check."
        )
    if unlikely_count:
        sentences.append(f"predicted: {unlikely_count} of {len(predictions)} cell(s) are unlikely to fit the memory of a GPU.")
    sentences += describe_host_memory(predictions)
    if unfit_count or unlikely_count:
        sentences.append(
            "Out of memory is a result, so --adapt changes no batch size. The column `largest micro` has the "
            "micro-batch that is likely to fit, where it is known; `search: {key: gpu_batch_size, for: "
            "largest_that_fits}` finds it."
        )
    for field, noun_phrase, format_value in _SUMMED_FIELDS:
        ranges_by_cell = {
            cell_name: summed_range
            for cell_name, prediction in predictions.items()
            if (summed_range := getattr(prediction, field)) is not None
        }
        if ranges_by_cell:
            sum_range = sum_ranges(
                {cell_name: summed_range.times(run_counts[cell_name]) for cell_name, summed_range in ranges_by_cell.items()}
            )
            cells_clause = (
                "" if len(ranges_by_cell) == len(predictions) else f" for {len(ranges_by_cell)} of {len(predictions)} cells"
            )
            sentences.append(
                f"predicted: {format_value(sum_range.likely)}{noun_phrase}{cells_clause} "
                f"({format_value(sum_range.low)} to {format_value(sum_range.high)})."
            )
    return sentences


def describe_host_memory(predictions: Mapping[str, Prediction]) -> list[str]:
    """Sentences about the cells whose processes need more than the memory of a node, or most of it."""
    close_predictions = {
        cell_name: prediction for cell_name, prediction in predictions.items() if host_memory.nearly_fills_node(prediction)
    }
    exceeding_predictions = {
        cell_name: prediction for cell_name, prediction in close_predictions.items() if host_memory.exceeds_node(prediction)
    }
    near_predictions = {
        cell_name: prediction for cell_name, prediction in close_predictions.items() if cell_name not in exceeding_predictions
    }
    left_out_hint = "; `jobs submit` leaves them out, unless they expect oom, or with --no-fit-check"
    return [
        f"predicted: {len(cell_group)} of {len(predictions)} cell(s) need {share_phrase} of the host memory of a "
        f"node{hint}: {', '.join(list(cell_group)[:MOST_SHOWN_NAMES])}{' ...' if len(cell_group) > MOST_SHOWN_NAMES else ''}."
        for cell_group, share_phrase, hint in (
            (exceeding_predictions, "more than all", left_out_hint),
            (near_predictions, f"more than {host_memory.WARNED_SHARE:.0%}", ""),
        )
        if cell_group
    ]


def describe_missing_memory(prediction: Prediction) -> str:
    """The memory that a cell certainly needs, and the memory that there is, of a GPU or of a node."""
    if host_memory.exceeds_node(prediction):
        assert prediction.host_bytes is not None
        assert prediction.host_capacity_bytes is not None
        return f"{format_size(prediction.host_bytes.low)} of a node's {format_size(prediction.host_capacity_bytes)}"
    assert prediction.memory_bytes is not None
    assert prediction.capacity_bytes is not None
    return f"{format_size(prediction.memory_bytes.low)} of a GPU's {format_size(prediction.capacity_bytes.high)}"


def print_scale_out(out: Output, scaled_by_cell: Mapping[str, Sequence[ScaledCell]]) -> None:
    """Print the predictions of each measured cell for the numbers of GPUs that --scale-out names."""
    columns: list[Column[tuple[str, ScaledCell]]] = [
        Column("cell", lambda row: row[0]),
        Column("GPUs", lambda row: str(row[1].gpus)),
        Column("memory", lambda row: format_memory(row[1].predicted)),
        Column("step", lambda row: _format_range(format_duration, row[1].step_s)),
        Column("speed-up", lambda row: _format_range(_format_factor, row[1].speedup)),
        Column("trust", lambda row: row[1].trust),
    ]
    table_rows = [(name, scaled_cell) for name, scaled_cells in scaled_by_cell.items() for scaled_cell in scaled_cells]
    out.show_table(Table("scale-out, with the same batch per GPU", columns, table_rows))


def _format_factor(factor: float) -> str:
    return f"{format_amount(factor)}x"


def format_duration(seconds: float) -> str:
    """A duration as text, such as `350 ms` or `12 s`; from a minute on, in the format of `moments.format_duration`."""
    if seconds < 1:
        return f"{format_amount(1000 * seconds)} ms"
    return f"{format_amount(seconds)} s" if seconds < 60 else moments.format_duration(seconds)


def format_memory(prediction: Prediction) -> str:
    """The predicted memory as text; '' if it is not known, and `more than` if it is only a lower bound."""
    if prediction.memory_bytes is None:
        return ""
    if prediction.memory_from == "formula" and prediction.formula_tensor_bytes is None:  # activations are not known
        return f"more than {format_size(prediction.memory_bytes.low)}"
    return format_size(prediction.memory_bytes.likely)


def _format_range(format_value: Callable[[float], str], predicted: PredictedRange | None) -> str:
    if predicted is None:
        return ""
    return f"{format_value(predicted.likely)} ({format_value(predicted.low)} to {format_value(predicted.high)})"


def _format_likely(predicted: PredictedRange | None) -> str:
    return "" if predicted is None else format_amount(predicted.likely)


_CELL_COLUMN: Column[tuple[str, Prediction]] = Column("cell", lambda row: row[0], priority=1)  # the handle names it too
_PREDICTION_COLUMNS: tuple[Column[tuple[str, Prediction]], ...] = (
    Column("memory", lambda row: format_memory(row[1])),
    Column(MEMORY_SOURCE_HEADING, lambda row: row[1].memory_from),
    Column("fits", lambda row: row[1].fits),
    Column("largest micro", lambda row: row[1].largest_micro_batch),
    Column("step", lambda row: _format_range(format_duration, row[1].step_s)),
    Column("time", lambda row: _format_range(format_duration, row[1].time_s)),
    Column("GPU hours", lambda row: _format_likely(row[1].gpu_hours)),
    Column("kWh", lambda row: _format_likely(row[1].energy_kwh)),
    Column("cost", lambda row: "" if row[1].cost is None else f"{row[1].cost.likely:.2f}"),
    Column("bottleneck", lambda row: row[1].bottleneck),
)
_SUMMED_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("time_s", " for all runs in sequence", format_duration),
    ("gpu_hours", " GPU hours", format_amount),
    ("energy_kwh", " kWh of the GPUs", format_amount),
    ("cost", " by price_per_gpu_hour", lambda value: f"{value:.2f}"),
)
