"""Write the report's folder, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from collect import page, pictures, swap, tables
from collect.exports import csv, parquet
from collect.load import Loaded
from collect.summary import Summary
from shardlab import files
from shardlab.workspace import Workspace

PAGE = "index.html"
OURS = frozenset({PAGE, "summary.json", "tables", "figures"})


def write(folder: Path, workspace: Workspace, loaded: Loaded, summary: Summary, images: Sequence[str] = ()) -> None:
    """index.html, summary.json, tables/ and, in the formats of `images`, figures/.

    A kill leaves the report that was there, or this one whole. Raises InputError where the folder holds what is not of a
    report, WorkspaceError where it cannot be written, and what `pictures.write` raises.
    """
    with swap.replacing(folder, OURS) as fresh:
        (fresh / "tables").mkdir()
        cells = tables.summary(summary)
        csv.write(cells, fresh / "tables" / "summary.csv")
        parquet.write(cells, fresh / "tables" / "summary.parquet")
        parquet.write(tables.steps(loaded), fresh / "tables" / "steps.parquet")
        if images:
            (fresh / "figures").mkdir()
            pictures.write(fresh / "figures", page.drawings(loaded, summary), images, "collect summarize --images")
        files.write_json(fresh / "summary.json", summary)
        files.write_atomic(fresh / PAGE, page.draw(loaded, summary, folder, workspace.runs).encode())


def write_tables(
    folder: Path, frames: Mapping[str, pl.DataFrame], suffix: str, save: Callable[[pl.DataFrame, Path], None]
) -> list[Path]:
    """Each frame as NAME.SUFFIX in a folder, each replaced at once. Raises WorkspaceError; returns the paths."""
    files.make_folder(folder)
    written = []
    with files.as_workspace_error("write"):
        for name, frame in frames.items():
            path = folder / f"{name}.{suffix}"
            temporary = folder / f".{path.name}.tmp"
            save(frame, temporary)
            temporary.rename(path)
            written.append(path)
    return written
