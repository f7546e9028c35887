"""Draws which parts of memory a rank holds: observed at the peak, beside the estimate of papers, and by theory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from collect.drawing.stacked_bars import BarPanel, draw_bars, select_cells
from collect.figure import LINE, MUTED, SERIES, CellMark, Figure, WorkloadGroup, order_by_visibility
from collect.figures.memory_over_time import CATEGORIES, category_label
from collect.reading.load import LoadedCell
from shardlab.runs.prediction import Prediction
from shardlab.terminal import notation

# Term of the estimate -> the memory categories that are measured for this term. The estimate of `optimizer_state` does not
# contain `master_parameter`, the optimizer's own copy of the weights.
TERMS = {"parameter": ("parameter",), "gradient": ("gradient",), "optimizer_state": ("optimizer_state", "master_parameter")}
STATES = ("parameter", "master_parameter", "optimizer_state", "gradient", "gathered")  # what strategies shard or replicate
BY_THEORY = "tensors by theory, at the peak of a step"
# Other colours than those of STATES, because both panels share a legend.
EXCHANGES = {"all-reduce": SERIES[4], "all-gather": SERIES[5], "reduce-scatter": SERIES[7], "broadcast": LINE, "send": MUTED}


class TensorMemory(NamedTuple):
    """The memory of the tensors of a rank, without the process around them."""

    size_bytes: float
    kind: str
    """How the size is known, in words."""


def tensor_memory(cell: LoadedCell) -> TensorMemory | None:
    """The tensors of the rank that needs most, at the peak of a step: as the instrument `memory: categories` counted them, else
    as the planner predicted them; None if neither is known. A prediction that is only a lower bound is not known.

    On a CPU, this is the memory to compare: the interpreter and its libraries hide it in the resident set of a process."""
    counted_bytes, prediction = peak_bytes(cell), _memory_prediction(cell)
    if counted_bytes:
        return TensorMemory(sum(counted_bytes.values()), "tensors, counted at the peak of a step")
    predicted = prediction.tensor_bytes if prediction is not None and prediction.formula_tensor_bytes is not None else None
    return TensorMemory(predicted.likely, BY_THEORY) if predicted is not None and cell.completed_runs else None


def list_tensor_memory(cells: Iterable[LoadedCell]) -> dict[str, TensorMemory]:
    """The memory of the tensors of the cells for which it is known, by the id of the cell."""
    return {cell.id: memory for cell in cells if (memory := tensor_memory(cell)) is not None}


def draw_categories(group: WorkloadGroup) -> Figure | None:
    """Draw the peak memory of a step by category: one bar for each cell whose memory was observed by category, with a vertical
    mark at the estimate for the cell."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(peak_bytes(mark.cell)))
    if not drawn_group.marks:
        return None
    peaks = [peak_bytes(mark.cell) for mark in drawn_group.marks]
    unit, unit_bytes = notation.choose_unit([sum(peak.values()) for peak in peaks])
    estimates = [mark.row.metrics.get("estimated_memory_bytes") for mark in drawn_group.marks]
    estimated_bytes = [estimate.value if estimate else None for estimate in estimates]
    panel = BarPanel(unit, unit, peaks, CATEGORIES, None, unit_bytes, estimated_bytes, category_label)
    caption = (
        "Memory at the peak of the observed step, on the rank with the highest peak; mean over repeats. "
        f"Vertical mark: estimate of parameters, gradients and optimizer state, without activations.{left_out_note}"
    )
    return draw_bars("memory_categories", "Memory by category at the peak", caption, drawn_group, [panel])


def peak_bytes(cell: LoadedCell) -> dict[str, float]:
    """Bytes by category at the memory peak of a cell: the mean over completed repeats whose memory was observed by category."""
    run_peaks = [run.result.instruments.get("memory", {}).get("peak_bytes") for run in cell.completed_runs if run.result]
    known_peaks = [peak for peak in run_peaks if peak]
    categories = {category for peak in known_peaks for category in peak}
    return {category: sum(peak.get(category, 0) for peak in known_peaks) / len(known_peaks) for category in categories}


def draw_sharding(group: WorkloadGroup) -> Figure | None:
    """Draw how large parameters, gradients and optimizer state are on a rank, beside the estimate of the ZeRO paper: one panel
    per term of the estimate, with one bar for each cell that has an estimate."""
    drawn_group, left_out_note = select_cells(group, lambda mark: bool(estimate_bytes(mark)))
    if not drawn_group.marks:
        return None
    estimates = [estimate_bytes(mark) for mark in drawn_group.marks]
    bars_by_term = {term: [_measured_bytes(mark, names) for mark in drawn_group.marks] for term, names in TERMS.items()}
    measured_sizes = [size_bytes for bars in bars_by_term.values() for bar in bars for size_bytes in bar.values()]
    unit, size = notation.choose_unit([*measured_sizes, *(size_bytes for sizes in estimates for size_bytes in sizes.values())])
    panels = []
    for term, bars in bars_by_term.items():
        colours, estimated_bytes = {name: CATEGORIES[name] for name in TERMS[term]}, [sizes.get(term) for sizes in estimates]
        title = f"{term.removesuffix('_state')}, {unit}"
        panels.append(BarPanel(title, unit, bars, colours, None, size, estimated_bytes, category_label))
    caption = (
        "The largest size of each during the observed step, on the rank with the highest peak. Vertical mark: estimate, "
        "sharded as in the ZeRO paper (a gradient is as large as its parameter, Adam's state twice as large); the optimizer's "
        f"own copy of the weights is not in the estimate.{left_out_note}"
    )
    return draw_bars("sharding", "What sharding leaves on a rank", caption, drawn_group, panels)


def estimate_bytes(mark: CellMark) -> dict[str, int]:
    """The estimate for a cell in bytes, by term (TERMS). It is read from one completed repeat, because it is equal in all
    repeats."""
    results = [run.result for run in mark.cell.completed_runs if run.result]
    estimates = [result.instruments.get("memory", {}).get("estimate_bytes") for result in results]
    return next((estimate for estimate in estimates if estimate), {})


def _measured_bytes(mark: CellMark, categories: tuple[str, ...]) -> dict[str, float]:
    estimates = {name: mark.row.metrics.get(f"memory_{name}_bytes") for name in categories}
    return {name: estimate.value for name, estimate in estimates.items() if estimate}


def draw_theory(group: WorkloadGroup) -> Figure | None:
    """Draw what each strategy keeps and sends by theory, as the diagrams of study 1 (figures 1 and 2) show it.

    There are two bars for each cell with a prediction: the memory of a rank, and the bytes that it sends in a step.
    """
    predicted_marks = [mark for mark in group.marks if _memory_prediction(mark.cell)]
    marks = [mark for mark, visible in order_by_visibility(predicted_marks) if visible is True]
    predictions = [predicted for mark in marks if (predicted := _memory_prediction(mark.cell))]
    if not predictions:
        return None
    memory_bars = [
        {name: prediction.memory_by_category[name].likely for name in STATES if name in prediction.memory_by_category}
        for prediction in predictions
    ]
    unit, unit_bytes = notation.choose_unit([sum(sizes.values()) for sizes in memory_bars])
    colours = {name: CATEGORIES[name] for name in STATES}
    panels = [BarPanel(f"memory of a rank, {unit}", unit, memory_bars, colours, None, unit_bytes, get_label=category_label)]
    sent_bytes = [_sent_bytes(prediction) for prediction in predictions]
    unit, unit_bytes = notation.choose_unit([sum(sizes.values()) for sizes in sent_bytes if sizes])
    totals = [sum((sizes or {}).values()) / unit_bytes for sizes in sent_bytes]
    known_texts = [notation.format_number(total, 3) if total else "nothing" for total in totals]
    end_texts = ["" if sizes is None else text for sizes, text in zip(sent_bytes, known_texts, strict=True)]
    panels.append(BarPanel(f"sent by a rank in a step, {unit}", unit, sent_bytes, EXCHANGES, end_texts, unit_bytes))
    caption = (
        "By theory, before the runs (the planner's prediction), of the rank that needs or sends most. Memory: only what "
        "strategies shard or replicate, at the peak of a step (a gradient that is not there at this moment is not in it); "
        "gathered: parameters that a rank holds for a time to compute with them. Blank: not known."
    )
    drawn_group = msgspec.structs.replace(group, marks=marks)
    return draw_bars("theory", "What a rank keeps and sends, by theory", caption, drawn_group, panels)


def _memory_prediction(cell: LoadedCell) -> Prediction | None:
    """The first prediction, over the runs of a cell, that contains the memory of a rank."""
    predictions = (run.predicted for run in cell.runs)
    return next((entry for entry in predictions if entry and any(name in entry.memory_by_category for name in STATES)), None)


def _sent_bytes(prediction: Prediction) -> dict[str, float] | None:
    """The bytes that a rank sends in a step, by collective, such as `all-reduce`; None if they are not known."""
    if prediction.exchanges is None:
        return None
    bytes_by_name: dict[str, float] = {}
    for exchange in prediction.exchanges:
        collective = exchange.op.replace("_", "-")
        bytes_by_name[collective] = bytes_by_name.get(collective, 0.0) + exchange.sent_bytes
    return bytes_by_name
