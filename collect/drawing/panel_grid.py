"""Lays out a grid of panels with shared axes. Only the plots at the left and at the bottom have tick labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collect.figure import INK, MUTED, layout

BETWEEN = 0.06  # space between two plots that are beside each other, as a share of the width
HEAD_PX, TITLE_PX, SPACE_PX = 22, 24, 14  # heights: the title of the y axes, the title of a panel, the space below a plot
MARGINS_PX = 56  # height of the margins of the figure, with the title of the x axes
TICK_PX = 11
TITLE_CHARS = 26  # a longer title would reach into the next panel on a phone


class Place(NamedTuple):
    """A plot of the grid."""

    number: int  # number of its axes, from 1
    panel: int  # place of its panel, from 0
    plot: int  # place of the plot in its panel, from 0
    across: tuple[float, float]  # the domain of its x axis
    along: tuple[float, float]  # the domain of its y axis
    is_left: bool  # whether it has the tick labels of the y axis
    is_last: bool  # whether it has the tick labels of the x axis: no plot is below it

    @property
    def axes(self) -> dict[str, str]:
        """The axes of the traces that are drawn here."""
        return {"xaxis": numbered("x", self.number), "yaxis": numbered("y", self.number)}


class Grid(NamedTuple):
    """The plots of all panels, in order, and the height of all panels together with their titles."""

    places: list[Place]
    height_px: int
    plots: int  # number of plots of a panel
    is_beside: bool  # whether the plots of a panel are beside each other; else they are below each other


def numbered(name: str, number: int) -> str:
    """Plotly's name of an axis, such as `x2`. name: `x`, `y`, `xaxis` or `yaxis`. number: the number of the axis, from 1."""
    return name if number == 1 else f"{name}{number}"


def grid(heights_px: Sequence[int], columns: int, plots: int = 1, is_beside: bool = False, head_px: int = 0) -> Grid:
    """Place panels in rows from left to right.

    heights_px: the height of a plot of each panel. columns: how many panels are beside each other; 1 if `is_beside`.
    plots: number of plots of a panel. head_px: space above all panels.
    """
    stacked, across = (1, columns * plots) if is_beside else (plots, columns)
    rows = [max(heights_px[first : first + columns]) for first in range(0, len(heights_px), columns)]
    tall_px = [TITLE_PX + stacked * (height + SPACE_PX) for height in rows]
    whole_px = head_px + sum(tall_px)
    width = (1 - BETWEEN * (across - 1)) / across
    places: list[Place] = []
    for panel in range(len(heights_px)):
        row, column = divmod(panel, columns)
        top_px = head_px + sum(tall_px[:row]) + TITLE_PX
        for plot in range(plots):
            left = (plot if is_beside else column) * (width + BETWEEN)
            start_px = top_px + (0 if is_beside else plot * (rows[row] + SPACE_PX))
            along = (1 - (start_px + rows[row]) / whole_px, 1 - start_px / whole_px)
            is_last = panel + columns >= len(heights_px) and (is_beside or plot == plots - 1)
            places.append(Place(len(places) + 1, panel, plot, (left, left + width), along, left == 0, is_last))
    return Grid(places, whole_px, plots, is_beside)


def shape(
    of: Grid,
    titles: Sequence[str],
    x_axes: Sequence[dict[str, Any]],
    y_axes: Sequence[dict[str, Any]],
    y_title: str,
    own_y: bool,
) -> dict[str, Any]:
    """The layout of the figure. All plots of the same place in their panels share their axes.

    titles: of the panels. x_axes, y_axes: the axes of the plots of a panel, as they are without a grid. y_title: what is
    written above all panels in place of the titles of the y axes. own_y: whether each panel has a y axis of its own.
    """
    made = layout({}, {}, showlegend=True)
    made |= {"annotations": [_text(0, 1, y_title, MUTED)] if y_title else []}
    for place in of.places:
        x, y = dict(x_axes[place.plot if of.is_beside else 0]), dict(y_axes[0 if of.is_beside else place.plot])
        ticks = {"title": {"text": ""}, "automargin": False, "tickfont": {"size": TICK_PX, "color": MUTED}}
        x |= ticks | {"domain": list(place.across), "anchor": numbered("y", place.number), "showticklabels": place.is_last}
        y |= ticks | {"domain": list(place.along), "anchor": numbered("x", place.number), "showticklabels": place.is_left}
        first_x = place.plot + 1 if of.is_beside else 1
        first_y = place.number - place.plot if own_y else 1 if of.is_beside else place.plot + 1
        made[numbered("xaxis", place.number)] = x | _matching("x", first_x, place.number)
        made[numbered("yaxis", place.number)] = y | _matching("y", first_y, place.number)
        if place.plot == 0:
            title = titles[place.panel]
            shown = title if len(title) <= TITLE_CHARS else f"{title[: TITLE_CHARS - 1]}…"
            made["annotations"].append(_text(place.across[0], place.along[1], shown, INK))
    for x, place in zip(x_axes if of.is_beside else x_axes[:1], of.places, strict=False):
        middle = sum(place.across) / 2 if of.is_beside else 0.5
        at = {"xref": "paper", "yref": "paper", "x": middle, "y": 0, "xanchor": "center", "yanchor": "top", "yshift": -20}
        says = {"text": x["title"]["text"], "showarrow": False, "font": {"size": 12, "color": MUTED}}
        made["annotations"].append(at | says)
    return made


def _matching(name: str, first: int, number: int) -> dict[str, Any]:
    return {} if number == first else {"matches": numbered(name, first)}


def _text(x: float, y: float, text: str, colour: str) -> dict[str, Any]:
    """A text above the place (x, y) of the figure, or below it at the upper edge of the figure."""
    is_edge = y == 1
    at = {"xref": "paper", "yref": "paper", "x": x, "y": y, "xanchor": "left", "yanchor": "top" if is_edge else "bottom"}
    return at | {"yshift": 0 if is_edge else 1, "text": text, "showarrow": False, "font": {"size": 12, "color": colour}}
