"""Draws which parts of memory a rank holds: observed at the peak, beside the estimate of papers, and by theory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from collect.drawing.stacked_bars import BarPanel, draw_bars, select_cells
from collect.figure import LINE, MUTED, SERIES, CellMark, Figure, WorkloadGroup, order_by_visibility
from collect.figures.memory_over_time import CATEGORIES, format_category
from collect.reading.load import LoadedCell
from shardlab.runs.prediction import Prediction
from shardlab.terminal import notation

# Term of the estimate -> the memory categories that are measured for this term. The estimate of `optimizer_state` does not
# contain `master_parameter`, the optimizer's own copy of the weights.
TERMS = {"parameter": ("parameter",), "gradient": ("gradient",), "optimizer_state": ("optimizer_state", "master_parameter")}
SHARDED = ("parameter", "master_parameter", "optimizer_state", "gradient", "gathered")  # what strategies shard or replicate
BY_THEORY_KIND = "tensors by theory, at the peak of a step"
# Other colours than those of STATES, because both panels share a legend.
EXCHANGES = {"all-reduce": SERIES[4], "all-gather": SERIES[5], "reduce-scatter": SERIES[7], "broadcast": LINE, "send": MUTED}


class TensorMemory(NamedTuple):
    """The memory of the tensors of a rank, without the process around them."""

    size_bytes: float
    kind: str
    """How the size is known, in words."""


def find_tensor_memory(cell: LoadedCell) -> TensorMemory | None:
    """The tensors of the rank that needs most, at the peak of a step: as the instrument `memory: categories` counted them, else
    as the planner predicted them; None if neither is known. A prediction that is only a lower bound is not known.

    On a CPU, this is the memory to compare: the interpreter and its libraries hide it in the resident set of a process."""
    counted_bytes, prediction = average_peak_bytes(cell), _find_memory_prediction(cell)
    if counted_bytes:
        return TensorMemory(sum(counted_bytes.values()), "tensors, counted at the peak of a step")
    predicted = prediction.tensor_bytes if prediction is not None and prediction.formula_tensor_bytes is not None else None
    return TensorMemory(predicted.likely, BY_THEORY_KIND) if predicted is not None and cell.completed_runs else None


def map_tensor_memory(cells: Iterable[LoadedCell]) -> dict[str, TensorMemory]:
    """The memory of the tensors of the cells for which it is known, by the id of the cell."""
    return {cell.id: memory for cell in cells if (memory := find_tensor_memory(cell)) is not None}


def draw_categories(group: WorkloadGroup) -> Figure | None:
    """Draw the peak memory of a step by category: one bar for each cell whose memory was observed by category, with a vertical
    mark at the estimate for the cell."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(average_peak_bytes(mark.cell)))
    if not drawn_group.marks:
        return None
    peaks_of_cells = [average_peak_bytes(mark.cell) for mark in drawn_group.marks]
    unit, unit_bytes = notation.choose_unit([sum(bytes_by_category.values()) for bytes_by_category in peaks_of_cells])
    estimates = [mark.row.metrics.get("estimated_memory_bytes") for mark in drawn_group.marks]
    estimated_bytes = [estimate.value if estimate else None for estimate in estimates]
    panel = BarPanel(unit, unit, peaks_of_cells, CATEGORIES, None, unit_bytes, estimated_bytes, format_category)
    caption = (
        "Memory at the peak of the observed step, on the rank with the highest peak; mean over repeats. "
        f"Vertical mark: estimate of parameters, gradients and optimizer state, without activations.{left_out_note}"
    )
    return draw_bars("memory_categories", "Memory by category at the peak", caption, drawn_group, [panel])


def average_peak_bytes(cell: LoadedCell) -> dict[str, float]:
    """Bytes by category at the memory peak of a cell: the mean over completed repeats whose memory was observed by category."""
    peaks_of_runs = [run.result.instruments.get("memory", {}).get("peak_bytes") for run in cell.completed_runs if run.result]
    known_peaks = [peak for peak in peaks_of_runs if peak]
    categories = {category for peak in known_peaks for category in peak}
    return {category: sum(peak.get(category, 0) for peak in known_peaks) / len(known_peaks) for category in categories}


def draw_sharding(group: WorkloadGroup) -> Figure | None:
    """Draw how large parameters, gradients and optimizer state are on a rank, beside the estimate of the ZeRO paper: one panel
    per term of the estimate, with one bar for each cell that has an estimate."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(read_estimated_bytes(mark)))
    if not drawn_group.marks:
        return None
    estimates = [read_estimated_bytes(mark) for mark in drawn_group.marks]
    bars_by_term = {term: [_get_measured_bytes(mark, names) for mark in drawn_group.marks] for term, names in TERMS.items()}
    measured_sizes = [size_bytes for bars in bars_by_term.values() for bar in bars for size_bytes in bar.values()]
    unit, scale = notation.choose_unit([*measured_sizes, *(size_bytes for sizes in estimates for size_bytes in sizes.values())])
    panels = []
    for term, bars in bars_by_term.items():
        colours, estimated_bytes = {part: CATEGORIES[part] for part in TERMS[term]}, [sizes.get(term) for sizes in estimates]
        panel_title = f"{term.removesuffix('_state')}, {unit}"
        panels.append(BarPanel(panel_title, unit, bars, colours, None, scale, estimated_bytes, format_category))
    caption = (
        "The largest size of each during the observed step, on the rank with the highest peak. Vertical mark: "
        "estimate, sharded as in the ZeRO paper (a gradient is as large as its parameter, Adam's state twice as "
        f"large); the optimizer's own copy of the weights is not in the estimate.{left_out_note}"
    )
    return draw_bars("sharding", "What sharding leaves on a rank", caption, drawn_group, panels)


def read_estimated_bytes(mark: CellMark) -> dict[str, int]:
    """The estimate for a cell in bytes, by term (TERMS). It is read from one completed repeat, because it is equal in all
    repeats."""
    results = [run.result for run in mark.cell.completed_runs if run.result]
    estimates = [result.instruments.get("memory", {}).get("estimate_bytes") for result in results]
    return next((estimate for estimate in estimates if estimate), {})


def _get_measured_bytes(mark: CellMark, categories: tuple[str, ...]) -> dict[str, float]:
    estimate_by_category = {category: mark.row.metrics.get(f"memory_{category}_bytes") for category in categories}
    return {category: estimate.value for category, estimate in estimate_by_category.items() if estimate}


def draw_theory(group: WorkloadGroup) -> Figure | None:
    """Draw what each strategy keeps and sends by theory, as the diagrams of study 1 (figures 1 and 2) show it.

    There are two bars for each cell with a prediction: the memory of a rank, and the bytes that it sends in a step.
    """
    predicted_marks = [mark for mark in group.marks if _find_memory_prediction(mark.cell)]
    drawn_marks = [mark for mark, visible in order_by_visibility(predicted_marks) if visible is True]
    predictions = [predicted for mark in drawn_marks if (predicted := _find_memory_prediction(mark.cell))]
    if not predictions:
        return None
    memory_bars = [
        {part: prediction.memory_by_category[part].likely for part in SHARDED if part in prediction.memory_by_category}
        for prediction in predictions
    ]
    unit, unit_bytes = notation.choose_unit([sum(bytes_by_part.values()) for bytes_by_part in memory_bars])
    colours = {part: CATEGORIES[part] for part in SHARDED}
    panels = [BarPanel(f"memory of a rank, {unit}", unit, memory_bars, colours, None, unit_bytes, get_label=format_category)]
    sent_bytes = [_sum_sent_bytes(prediction) for prediction in predictions]
    unit, unit_bytes = notation.choose_unit([sum(bytes_by_part.values()) for bytes_by_part in sent_bytes if bytes_by_part])
    totals_in_unit = [sum((bytes_by_part or {}).values()) / unit_bytes for bytes_by_part in sent_bytes]
    known_texts = [notation.format_number(total_in_unit, 3) if total_in_unit else "nothing" for total_in_unit in totals_in_unit]
    end_texts = ["" if bytes_by_part is None else text for bytes_by_part, text in zip(sent_bytes, known_texts, strict=True)]
    panels.append(BarPanel(f"sent by a rank in a step, {unit}", unit, sent_bytes, EXCHANGES, end_texts, unit_bytes))
    caption = (
        "By theory, before the runs (the planner's prediction), of the rank that needs or sends most. Memory: only what "
        "strategies shard or replicate, at the peak of a step (a gradient that is not there at this moment is not in it); "
        "gathered: parameters that a rank holds for a time to compute with them. Blank: not known."
    )
    drawn_group = msgspec.structs.replace(group, marks=drawn_marks)
    return draw_bars("theory", "What a rank keeps and sends, by theory", caption, drawn_group, panels)


def _find_memory_prediction(cell: LoadedCell) -> Prediction | None:
    """The first prediction, over the runs of a cell, that contains the memory of a rank."""
    predictions = (run.predicted for run in cell.runs)
    return next((entry for entry in predictions if entry and any(part in entry.memory_by_category for part in SHARDED)), None)


def _sum_sent_bytes(prediction: Prediction) -> dict[str, float] | None:
    """The bytes that a rank sends in a step, by collective, such as `all-reduce`; None if they are not known."""
    if prediction.exchanges is None:
        return None
    bytes_by_collective: dict[str, float] = {}
    for exchange in prediction.exchanges:
        collective = exchange.op.replace("_", "-")
        bytes_by_collective[collective] = bytes_by_collective.get(collective, 0.0) + exchange.sent_bytes
    return bytes_by_collective
