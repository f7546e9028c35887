"""Draws what each strategy keeps and sends by theory, as the diagrams of study 1 (figures 1 and 2) show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from collect import notation
from collect.drawing.stacked_bars import BarPanel, BarPart, draw_bars
from collect.figure import LINE, MUTED, CellMark, Figure, Group, order_by_visibility
from collect.figures.memory_timeline import CATEGORIES, category_label
from shardlab.runs.prediction import Prediction

STATES = ("parameter", "master_parameter", "optimizer_state", "gradient", "gathered")  # what strategies shard or replicate
COLLECTIVES = {  # other colours than those of STATES, because both panels share a legend
    "all_reduce": "var(--series-4)",
    "all_gather": "var(--series-5)",
    "reduce_scatter": "var(--series-7)",
    "broadcast": LINE,
    "send": MUTED,
}


def draw(group: Group) -> Figure | None:
    """Two bars for each cell with a prediction: the memory of a rank, and the bytes that it sends in a step."""
    marks = [mark for mark, visible in order_by_visibility(group.marks) if visible is True and _memory_prediction(mark)]
    predictions = [predicted for mark in marks if (predicted := _memory_prediction(mark))]
    if not predictions:
        return None
    memory = [
        {name: prediction.memory_by_category[name].likely for name in STATES if name in prediction.memory_by_category}
        for prediction in predictions
    ]
    sent = [_sent_bytes(prediction) for prediction in predictions]
    panels = [
        _bytes_panel("memory of a rank", memory, {name: CATEGORIES[name] for name in STATES}, category_label, ""),
        _bytes_panel("sent by a rank in a step", sent, COLLECTIVES, lambda name: name.replace("_", "-"), "nothing"),
    ]
    caption = (
        "By theory, before the runs (the planner's prediction), of the rank that needs or sends most. Memory: only what "
        "strategies shard or replicate, at the peak of a step (a gradient that is not there at this moment is not in it); "
        "gathered: parameters that a rank holds for a time to compute with them. Blank: not known."
    )
    return draw_bars(
        "theory", "What a rank keeps and sends, by theory", caption, msgspec.structs.replace(group, marks=marks), panels
    )


def _memory_prediction(mark: CellMark) -> Prediction | None:
    """The first prediction, over the runs of a cell, that contains the memory of a rank."""
    predictions = (run.predicted for run in mark.cell.runs)
    return next((entry for entry in predictions if entry and any(name in entry.memory_by_category for name in STATES)), None)


def _sent_bytes(prediction: Prediction) -> dict[str, float] | None:
    """The bytes that a rank sends in a step, by collective; None if they are not known."""
    if prediction.exchanges is None:
        return None
    sent: dict[str, float] = {}
    for exchange in prediction.exchanges:
        sent[exchange.op] = sent.get(exchange.op, 0.0) + exchange.sent_bytes
    return sent


def _bytes_panel(
    title: str,
    bars: Sequence[dict[str, float] | None],
    colours: dict[str, str],
    get_label: Callable[[str], str],
    zero_text: str,
) -> BarPanel:
    """A panel of bars. bars: for each bar, bytes by part; None: not known. zero_text: the text of a bar of 0 bytes."""
    unit, size = notation.bytes_unit([sum(bar.values()) for bar in bars if bar])
    parts = [
        BarPart(get_label(name), colour, [bar[name] / size if bar and name in bar else None for bar in bars])
        for name, colour in colours.items()
        if any(bar and bar.get(name) for bar in bars)
    ]
    end_texts = [
        "" if bar is None else notation.format_number(sum(bar.values()) / size, 3) if sum(bar.values()) else zero_text
        for bar in bars
    ]
    return BarPanel(f"{title}, {unit}", unit, parts, end_texts)
