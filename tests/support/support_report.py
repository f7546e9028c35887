"""Reads the page of a report: the figures that it has, and what it holds compressed."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable

from collect import figure
from collect.report import page


def page_figures() -> list[Callable[[figure.WorkloadGroup], figure.Figure | None]]:
    """What draws the figures of a report, in the order of the page."""
    return [draw for part in page.PARTS.values() for draw in part.draw_figures]


def packed_plotly() -> str:
    """The script of plotly as a page holds it."""
    return page.compress(page.read_plotly_script().encode())


def unpack(text: str, name: str) -> str:
    """A compressed script of a page. text: the page. name: `plotly` or `specs`."""
    (packed,) = re.findall(rf'<script type="application/gzip" id="{name}">([^<]*)</script>', text)
    return gzip.decompress(base64.b64decode(packed)).decode()
