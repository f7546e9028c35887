"""Colours, symbols and dashes of strategies differ, are the same in all figures, and are visible to colour-blind readers."""

import itertools

import msgspec
import numpy as np
import plotly.graph_objects
import pytest
import support_collect as support

from collect import figure, strategy_style, summary
from collect.drawing import axes
from collect.reading import load
from collect.report import page, palette
from jobs.planning.resolve import resolve_cells
from shardlab.matrix import matrix
from shardlab.matrix.expansion import Expansion
from shardlab.runs.run import make_run_id
from shardlab.workspace.workspace import Workspace

SERIES = [f"series-{number}" for number in range(1, strategy_style.COLOURS + 1)]
# Matrices that transform linear RGB into the colours that people without working L cones (protanopia) or M cones
# (deuteranopia) see. From Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009, table 1, severity 1.0.
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
# Matrices that transform linear RGB to the colour space OKLab (Ottosson, 2020), in which equal distances look equally large.
CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]])
CONES = np.vstack([CONES, [0.0883024619, 0.2817188376, 0.6299787005]])
LAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]])
LAB = np.vstack([LAB, [0.0259040371, 0.7827717662, -0.8086757660]])
APART = 0.08  # the least distance of two colours in OKLab. The distance of black and white is 1.


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """The contrast ratio of two colours from 1 to 21, as the standard WCAG 2.2 defines it."""
    dark, light = sorted(float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen(colour, vision):
    return LAB @ np.cbrt(CONES @ np.clip(VISION[vision] @ linear(colour), 0, 1))


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_series_colours_contrast_with_their_background(colours):
    for name, ground in itertools.product(SERIES, ("page", "raised")):
        assert contrast(colours[name], colours[ground]) >= 3, (name, ground)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_series_colours_are_distinguished_also_without_red_or_green(colours, vision):
    for one, other in itertools.combinations(SERIES, 2):
        apart = float(np.linalg.norm(seen(colours[one], vision) - seen(colours[other], vision)))
        assert apart >= APART, (one, other, apart)


def test_red_and_green_of_equal_lightness_would_be_found():
    """The check of colours can fail: it finds that this red and this green look almost equal to people with deuteranopia.

    To most people the two colours look different.
    """
    red, green = "#c04040", "#6b7a1e"
    assert np.linalg.norm(seen(red, "all cones") - seen(green, "all cones")) > 2 * APART
    assert np.linalg.norm(seen(red, "deuteranopia") - seen(green, "deuteranopia")) < APART


def test_strategies_and_their_variants_look_different_from_one_another():
    every = [
        strategy_style.make_strategy_look(strategy, variant)
        for strategy in range(strategy_style.MOST_STRATEGIES)
        for variant in range(strategy_style.MOST_VARIANTS)
    ]
    assert len(set(every)) == 24 * 24
    first = [strategy_style.make_strategy_look(strategy) for strategy in range(strategy_style.MOST_STRATEGIES)]
    assert len({(one.colour, one.symbol) for one in first}) == 24, "marks alone tell strategies apart"
    assert len({(one.colour, one.dash) for one in first}) == 24, "lines alone tell strategies apart"


def test_a_strategy_keeps_its_colour_and_shape_in_all_its_variants():
    for strategy in range(strategy_style.MOST_STRATEGIES):
        own = [strategy_style.make_strategy_look(strategy, variant) for variant in range(strategy_style.MOST_VARIANTS)]
        assert len({one.colour for one in own}) == 1
        assert len({one.symbol.removesuffix("-open").removesuffix("-dot").removesuffix("-open") for one in own}) == 1


def test_plotly_knows_every_symbol_and_every_dash():
    for strategy, variant in itertools.product(range(strategy_style.MOST_STRATEGIES), range(strategy_style.MOST_VARIANTS)):
        one = strategy_style.make_strategy_look(strategy, variant)
        plotly.graph_objects.Scatter(marker={"symbol": one.symbol}, line={"dash": one.dash})


def drawn(path, cells, completed):
    """The (groups of cells, figures) of a workspace with these cells. Only the cells in `completed` have a completed run."""
    workspace = Workspace(path)
    workspace.store_expansion(
        msgspec.convert(
            {
                "schema": 1,
                "name": "all",
                "title": "",
                "path": "all.yaml",
                "excluded": [],
                "cells": [
                    {"id": cell.name(), "cell": msgspec.to_builtins(cell), "runs": [make_run_id(cell, 1)]} for cell in cells
                ],
            },
            type=Expansion,
        )
    )
    for cell in completed:
        support.completed(workspace, cell)
    loaded = load.load_matrix(workspace, None)
    summarized = summary.summarize(loaded, "single")
    return figure.group_by_workload(loaded, summarized), page.draw_figures(loaded, summarized)


@pytest.mark.parametrize("name", ["paper1", "paper2", "paper3", "paper4", "paper5", "quickstart", "paper3-faults"])
def test_every_cell_of_a_shipped_matrix_has_a_look_of_its_own(name, tmp_path):
    cells = resolve_cells(matrix.load_matrix(matrix.find_matrix_file(name)))
    groups, _ = drawn(tmp_path, cells, [])
    assert sum(len(group.marks) for group in groups) == len(cells)
    strategies = {}
    for group in groups:
        assert len({mark.look for mark in group.marks}) == len(group.marks)
        for mark in group.marks:
            strategies.setdefault(mark.cell.cell.strategy, set()).add(mark.look.colour)
    assert all(len(colours) == 1 for colours in strategies.values())


def test_a_strategy_looks_the_same_in_every_figure(tmp_path):
    """Cells of ten strategies, which are more than the available colours, and few enough cells for one plot.

    In all figures, every mark of a strategy has the strategy's colour.
    """
    names = ["single", "ddp", "fsdp2", "fsdp2-zero2", "zero0", "zero1", "zero2", "zero3", "fsdp1-full-shard", "tp"]
    cells = [support.cell(name, 1 if name == "single" else 2) for name in names] + [support.cell("ddp", 4)]
    (group,), figures = drawn(tmp_path, cells, cells)
    strategy_of = {mark.label: mark.cell.cell.strategy for mark in group.marks}
    colours, shapes, kinds = {}, {}, set()
    for one in figures:
        for trace in one.spec["data"]:
            name = trace.get("name") or (trace["y"][0] if trace.get("y") and isinstance(trace["y"][0], str) else None)
            strategy = strategy_of.get(name, name)
            marker, line = trace.get("marker", {}), trace.get("line", {})
            if strategy not in names or not (colour := line.get("color") if "dash" in line else marker.get("color")):
                continue
            kinds.add(one.kind)
            colours.setdefault(strategy, set()).add(colour)
            if "symbol" in marker:
                shapes.setdefault(strategy, set()).add(marker["symbol"].removesuffix("-open"))
    assert {"throughput_per_s", "speed_up", "loss", "telemetry", "peak_memory_bytes"} <= kinds
    assert colours.keys() == set(names)
    assert all(len(found) == 1 for found in colours.values()), colours
    looks = {(*colours[name], *shapes[name]) for name in names}
    assert len(looks) == len(names), looks


def test_the_labels_of_a_y_axis_of_numbers_do_not_set_the_margin_beside_a_legend():
    """A figure with numbers on its y axis and a legend has a fixed left margin.

    With an automatic margin, plotly gave up with a warning, because ticks, legend and margin kept changing each other.
    """
    numbers, names = axes.make_axis("seconds"), axes.make_axis("", type="category")
    beside = axes.make_layout(axes.make_axis("epoch"), numbers, showlegend=True, yaxis2=numbers)
    assert [beside[name]["automargin"] for name in ("yaxis", "yaxis2")] == [False, False]
    assert beside["margin"]["l"] == axes.Y_LABELS_PX
    for alone in (
        axes.make_layout(axes.make_axis("ms"), numbers),
        axes.make_layout(axes.make_axis("ms"), names, showlegend=True),
    ):
        assert alone["yaxis"]["automargin"] is True
        assert alone["margin"]["l"] < axes.Y_LABELS_PX
