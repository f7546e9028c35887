"""The colours of a report. The page uses them as CSS variables; an image file of a figure contains the colours themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Text has the colours ink, muted, link, good, warn and bad. The contrast of each of these colours with its background is at
# least 4.5, as WCAG 2.2 requires for text (criterion 1.4.3). Graphics have the series colours. Their contrast is at least 3, as
# WCAG requires for graphics (criterion 1.4.11), and people who cannot see red or green can distinguish each pair of them.
# tests/collect/figures/test_strategy_style.py checks these rules.
LIGHT = {
    "page": "#fdfdfc", "raised": "#ffffff", "ink": "#1b1d1f", "muted": "#646a70", "line": "#e4e5e3", "link": "#0a5aa8",
    "good": "#1a7346", "warn": "#935a00", "bad": "#b3261e", "warn-wash": "#fdf5e4", "warn-line": "#dba234",
    "series-1": "#0b6bb5", "series-2": "#d65f0e", "series-3": "#4a9aa7", "series-4": "#7c3367", "series-5": "#8d73f0",
    "series-6": "#62460c", "series-7": "#0f4038", "series-8": "#2a2f8f",
}  # fmt: skip
DARK = {
    "page": "#141618", "raised": "#1d2023", "ink": "#e8e9ea", "muted": "#9aa1a8", "line": "#2d3135", "link": "#7cb8ee",
    "good": "#62c794", "warn": "#e3b261", "bad": "#f28b82", "warn-wash": "#2a2316", "warn-line": "#96732c",
    "series-1": "#5aaef0", "series-2": "#ff8a3d", "series-3": "#87e3c4", "series-4": "#985593", "series-5": "#fce872",
    "series-6": "#3173e1", "series-7": "#b34f2a", "series-8": "#c08295",
}  # fmt: skip


def resolve_colours(figure_json: Any, colours: Mapping[str, str]) -> Any:
    """The JSON of a figure, with the colour NAME in place of each `var(--NAME)`. Raises KeyError if there is no colour of
    this name."""
    if isinstance(figure_json, str):
        return colours[figure_json[6:-1]] if figure_json.startswith("var(--") else figure_json
    if isinstance(figure_json, Mapping):
        return {key: resolve_colours(item, colours) for key, item in figure_json.items()}
    if isinstance(figure_json, list | tuple):
        return [resolve_colours(item, colours) for item in figure_json]
    return figure_json
