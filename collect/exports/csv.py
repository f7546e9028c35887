"""CSV: what every program reads; an absent value is an empty field."""

from __future__ import annotations

from pathlib import Path

import polars as pl


def write(frame: pl.DataFrame, path: Path) -> None:
    frame.write_csv(path)
