"""Writes each figure of the report as an SVG or PNG file. The library kaleido draws it with plotly in a browser without
a window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.report import palette
from collect.report.page import DrawnFigure, draw_figures
from collect.summary import Summary
from shardlab.errors import InputError, MissingExtra
from shardlab.files import files

FORMATS = ("svg", "png")
FOLDER = "figures"
SCALE_BY_FORMAT = {"svg": 1, "png": 2}  # how many pixels of a picture stand for one pixel of the page, in each direction
BROWSER_MISSING_MESSAGE = (
    "{} needs Chrome or Chromium, which was not found; install one (on Debian: apt install chromium), or set "
    "BROWSER_PATH to its path. The buttons in the report save the same images in any browser."
)


def parse_formats(option_value: str, option: str) -> tuple[str, ...]:
    """The picture formats that an option asks for, each once. Raises InputError if a format is not known.

    option_value: the value of the option, such as `svg,png`. option: the name of the option, for the error message.
    """
    format_names = tuple(dict.fromkeys(name.strip() for name in option_value.split(",")))
    if unknown_names := [name for name in format_names if name not in FORMATS]:
        raise InputError(f"{option}: found {unknown_names[0]!r}. Allowed: {', '.join(FORMATS)}.")
    return format_names


def make_picture_export(suffix: str, help_text: str) -> Export:
    """Make an export of `collect export` that writes only the figures, as picture files of one format.

    suffix: the format, `svg` or `png`; also the name of the export. help_text: the help text of this export.
    """

    def write_all(loaded: LoadedMatrix, summarized: Summary, folder: Path, _place: Path) -> None:
        (folder / FOLDER).mkdir()
        write_pictures(folder / FOLDER, draw_figures(loaded, summarized), (suffix,), f"collect export --to {suffix}")

    return Export(name=suffix, summary=help_text, written_names=frozenset({FOLDER}), write=write_all, package="kaleido")


def write_pictures(folder: Path, figures: Sequence[DrawnFigure], formats: Sequence[str], command: str) -> None:
    """Write each figure as NAME.svg or NAME.png into a folder, in the colours of the light mode. One browser draws all figures.

    formats: the formats. command: the command that needs the pictures, for error messages.

    Raises MissingExtra if kaleido is not installed, InputError if no browser is found.
    """
    try:
        import kaleido  # type: ignore[import-untyped]
        from choreographer.errors import ChromeNotFoundError
    except ModuleNotFoundError:
        raise MissingExtra(command, "kaleido") from None
    pictures = []
    for figure in figures:
        figure_spec = palette.resolve_colours(figure.spec, palette.LIGHT)
        picture, data = figure_spec["picture"], [trace for trace in figure_spec["data"] if trace.get("visible") != "legendonly"]
        for name in formats:
            opts = {"format": name, "width": picture["width"], "height": picture["height"], "scale": SCALE_BY_FORMAT[name]}
            picture_figure = {"data": data, "layout": figure_spec["layout"] | picture}
            pictures.append((folder / f"{figure.name}.{name}", picture_figure, opts))
    try:
        asyncio.run(_draw_pictures(kaleido.Kaleido, pictures))
    except ChromeNotFoundError:
        raise InputError(BROWSER_MISSING_MESSAGE.format(command)) from None


async def _draw_pictures(
    browser_kind: Callable[..., Any], pictures: Sequence[tuple[Path, dict[str, Any], dict[str, Any]]]
) -> None:
    """Draw each figure and write its file. kaleido could write the file itself, but it hides the reason if the writing
    fails."""
    async with browser_kind(mathjax=False) as browser:  # with MathJax, the browser would load MathJax from the network
        for path, picture_figure, picture_options in pictures:
            files.write_new(path, await browser.calc_fig(picture_figure, picture_options))
