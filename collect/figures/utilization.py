"""How busy GPUs and processors were and how full the memory of GPUs was, cell beside cell: as in study 3 (5.1.2, 5.1.3)."""

from __future__ import annotations

from typing import Any

from collect.figure import INK, Figure, Group, by_cell, by_cell_height, interval, states

# (metric, what it is called, symbol): what a mark is of, as its row says the cell
MARKS = (
    ("gpu_pct", "GPUs busy", "circle-open"),
    ("gpu_memory_pct", "GPU memory in use, maximum", "square-open"),
    ("cpu_pct", "processors busy", "diamond-open"),
)
KEY_PX = 66  # of the legend, in up to three lines on a phone


def draw(group: Group) -> Figure | None:
    """A mark with its interval per cell and quantity, all in percent of what the hosts have.

    No figure without GPUs: the processors alone have their column in the table and their panel over time.
    """
    known = [entry for entry in MARKS if any(entry[0] in mark.row.metrics for mark in group.marks)]
    if all(name == "cpu_pct" for name, _, _ in known):
        return None
    has = [mark.row.n > 0 or any(name in mark.row.metrics for name, _, _ in known) for mark in group.marks]
    data = [states(group, has)]  # a completed run without telemetry is blank
    data[0]["showlegend"] = False
    for name, says, symbol in known:
        data.append(_key(says, symbol))
        for mark in group.marks:
            if estimate := mark.row.metrics.get(name):
                data.append(
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "x": [estimate.value],
                        "y": [mark.label],
                        "error_x": interval(estimate, mark.look.colour),
                        "marker": {
                            "color": mark.look.colour,
                            "symbol": symbol,
                            "size": 10,
                            "line": {"width": 2, "color": mark.look.colour},
                        },
                        "legendgroup": says,
                        "showlegend": False,
                        "hovertemplate": f"{says}: %{{x:.3~g}} %, n = {estimate.n}<extra>%{{y}}</extra>",
                    }
                )
    caption = (
        "While steps were timed. GPUs: mean over the GPUs of the run. GPU memory: the highest share of any of these GPUs. "
        "Processors: mean over all processors of the hosts. Means over repeats with their 95 % intervals."
    )
    shape = by_cell(group, "%") | {"showlegend": True}
    shape["xaxis"] |= {"range": [-2, 102]}
    return Figure("utilization", "Utilization", caption, by_cell_height(group) + KEY_PX, data, shape)


def _key(says: str, symbol: str) -> dict[str, Any]:
    """The line of the legend that says what a symbol stands for, in no cell's colour."""
    marker = {"color": INK, "symbol": symbol, "size": 10, "line": {"width": 2}}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": says, "legendgroup": says, "marker": marker}
