"""Lays out a grid of panels with shared axes. Only the plots at the left and at the bottom have tick labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collect.drawing.axes import make_layout, make_panel_title, name_axis
from collect.figure import INK, MUTED

PLOT_GAP = 0.06  # space between two plots that are beside each other, as a share of the width
HEAD_PX, TITLE_PX, SPACE_PX = 22, 24, 14  # heights: the title of the y axes, the title of a panel, the space below a plot
MARGINS_PX = 56  # height of the margins of the figure, with the title of the x axes
TICK_PX = 11
TITLE_CHARS = 26  # a longer title would reach into the next panel on a phone


class PlotPosition(NamedTuple):
    """A plot of the grid."""

    axes_number: int
    """Number of its axes, from 1."""
    panel_index: int
    """Place of its panel, from 0."""
    plot_index: int
    """Place of the plot in its panel, from 0."""
    x_domain: tuple[float, float]
    """The domain of its x axis."""
    y_domain: tuple[float, float]
    """The domain of its y axis."""
    is_left: bool
    """Whether it has the tick labels of the y axis."""
    is_last: bool
    """Whether it has the tick labels of the x axis: no plot is below it."""

    @property
    def axes(self) -> dict[str, str]:
        """The axes of the traces that are drawn here."""
        return {"xaxis": name_axis("x", self.axes_number), "yaxis": name_axis("y", self.axes_number)}


class PanelGrid(NamedTuple):
    """The plots of all panels, in order, and the height of all panels together with their titles."""

    positions: list[PlotPosition]
    height_px: int
    plots_per_panel: int
    """Number of plots of a panel."""
    side_by_side: bool
    """Whether the plots of a panel are beside each other; else they are below each other."""


def arrange_panels(
    heights_px: Sequence[int], column_count: int, plots_per_panel: int = 1, side_by_side: bool = False, head_px: int = 0
) -> PanelGrid:
    """Place panels in rows from left to right.

    heights_px: the height of a plot of each panel. column_count: how many panels are beside each other; 1 if `side_by_side`.
    plots_per_panel: number of plots of a panel. head_px: space above all panels.
    """
    plots_down, plots_across = (1, column_count * plots_per_panel) if side_by_side else (plots_per_panel, column_count)
    plot_heights_px = [max(heights_px[first : first + column_count]) for first in range(0, len(heights_px), column_count)]
    row_heights_px = [TITLE_PX + plots_down * (plot_height_px + SPACE_PX) for plot_height_px in plot_heights_px]
    total_px = head_px + sum(row_heights_px)
    plot_width = (1 - PLOT_GAP * (plots_across - 1)) / plots_across
    positions: list[PlotPosition] = []
    for panel_index in range(len(heights_px)):
        row, column = divmod(panel_index, column_count)
        top_px = head_px + sum(row_heights_px[:row]) + TITLE_PX
        for plot_index in range(plots_per_panel):
            left_edge = (plot_index if side_by_side else column) * (plot_width + PLOT_GAP)
            start_px = top_px + (0 if side_by_side else plot_index * (plot_heights_px[row] + SPACE_PX))
            y_domain = (1 - (start_px + plot_heights_px[row]) / total_px, 1 - start_px / total_px)
            is_last = panel_index + column_count >= len(heights_px) and (side_by_side or plot_index == plots_per_panel - 1)
            x_domain, axes_number = (left_edge, left_edge + plot_width), len(positions) + 1
            positions.append(PlotPosition(axes_number, panel_index, plot_index, x_domain, y_domain, left_edge == 0, is_last))
    return PanelGrid(positions, total_px, plots_per_panel, side_by_side)


def grid_layout(
    grid: PanelGrid,
    panel_titles: Sequence[str],
    x_axes: Sequence[dict[str, Any]],
    y_axes: Sequence[dict[str, Any]],
    y_title: str,
    y_per_panel: bool,
) -> dict[str, Any]:
    """The layout of the figure. All plots of the same place in their panels share their axes.

    panel_titles: of the panels. x_axes, y_axes: the axes of the plots of a panel, as they are without a grid. y_title: what is
    written above all panels in place of the titles of the y axes. y_per_panel: whether each panel has a y axis of its own.
    """
    figure_layout = make_layout({}, {}, showlegend=True)
    figure_layout |= {"annotations": [make_panel_title(y_title, 1, yanchor="top", yshift=0)] if y_title else []}
    for position in grid.positions:
        x_plot, y_plot = (position.plot_index, 0) if grid.side_by_side else (0, position.plot_index)
        tick_settings = {"title": {"text": ""}, "automargin": False, "tickfont": {"size": TICK_PX, "color": MUTED}}
        x_position = {"domain": list(position.x_domain), "anchor": name_axis("y", position.axes_number)}
        y_position = {"domain": list(position.y_domain), "anchor": name_axis("x", position.axes_number)}
        x_axis = x_axes[x_plot] | tick_settings | x_position | {"showticklabels": position.is_last}
        y_axis = y_axes[y_plot] | tick_settings | y_position | {"showticklabels": position.is_left}
        shared_x = position.plot_index + 1 if grid.side_by_side else 1
        shared_y = (
            position.axes_number - position.plot_index if y_per_panel else 1 if grid.side_by_side else position.plot_index + 1
        )
        for axis_letter, axis_settings, shared_number in (("x", x_axis, shared_x), ("y", y_axis, shared_y)):
            axis_match = {} if position.axes_number == shared_number else {"matches": name_axis(axis_letter, shared_number)}
            figure_layout[name_axis(f"{axis_letter}axis", position.axes_number)] = axis_settings | axis_match
        if position.plot_index == 0:
            title = panel_titles[position.panel_index]
            shown_title = title if len(title) <= TITLE_CHARS else f"{title[: TITLE_CHARS - 1]}…"
            title_settings = {"x": position.x_domain[0], "yshift": 1, "font": {"size": 12, "color": INK}}
            figure_layout["annotations"].append(make_panel_title(shown_title, position.y_domain[1], **title_settings))
    for x_axis, position in zip(x_axes if grid.side_by_side else x_axes[:1], grid.positions, strict=False):
        middle_x = sum(position.x_domain) / 2 if grid.side_by_side else 0.5
        title_settings = {"x": middle_x, "xanchor": "center", "yanchor": "top", "yshift": -20}
        figure_layout["annotations"].append(make_panel_title(x_axis["title"]["text"], 0, **title_settings))
    return figure_layout
