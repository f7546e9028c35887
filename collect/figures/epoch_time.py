"""How long each epoch took, and what it came to on average so far: the first ones are often slower."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from collect.figure import MOST_SHOWN, Figure, Group, axis, layout, thin


def draw(group: Group) -> Figure | None:
    """Dots for the epochs and a line for their running average, of the first completed repeat of each cell with epochs."""
    data: list[dict[str, Any]] = []
    for mark in group.marks:
        result = mark.cell.completed[0].result if mark.cell.completed else None
        if result is None or not result.epoch_time_s:
            continue
        times = result.epoch_time_s
        numbers = [float(number) for number in range(1, len(times) + 1)]
        averages = [total / number for total, number in zip(accumulate(times), numbers, strict=True)]
        visible = True if len(data) < 2 * MOST_SHOWN else "legendonly"
        shared = {"type": "scatter", "name": mark.label, "legendgroup": mark.label, "visible": visible}
        for mode, values in (("markers", times), ("lines", averages)):
            x, y = thin(numbers, values)
            data.append(
                {
                    **shared,
                    "mode": mode,
                    "x": x,
                    "y": y,
                    "showlegend": mode == "lines",
                    "line": {"color": mark.look.colour, "dash": mark.look.dash, "width": 2},
                    "marker": {"color": mark.look.colour, "symbol": mark.look.symbol, "size": 4, "opacity": 0.45},
                    "hovertemplate": f"%{{y:.4~g}} s, {'epoch' if mode == 'markers' else 'mean of epochs up to'} %{{x}}",
                }
            )
    caption = (
        "Dots: the step times of an epoch summed, each of its slowest rank. Lines: the running average, the mean of all epochs "
        "up to that one. The first completed repeat of each cell."
    )
    shape = layout(axis("epoch", showgrid=False), axis("seconds", rangemode="tozero"), showlegend=True)
    return Figure("epoch_time", "Time of an epoch", caption, 380, data, shape) if data else None
