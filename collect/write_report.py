"""Writes the report of a matrix into a folder, completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collect import atomic_folder, flat_tables
from collect.exports import latex, markdown
from collect.reading.load import Loaded
from collect.report import page, pictures
from collect.summary import Summary
from shardlab.files import files
from shardlab.workspace.workspace import Workspace

PAGE = "index.html"
OURS = frozenset({PAGE, "summary.json", "tables", "figures"})


def write(
    folder: Path,
    workspace: Workspace,
    loaded: Loaded,
    summary: Summary,
    images: Sequence[str] = (),
    shown_in: Path | None = None,
) -> None:
    """Write the report into `folder`: index.html, summary.json, tables/ and, if `images` names formats, figures/.

    images: formats of image files in which all figures are also written, such as `png`.

    shown_in: the folder in which readers open the report, if it is not `folder`; links to runs are relative to `shown_in`.

    If the process is killed, the folder contains either the complete earlier report or the complete new report. Raises
    InputError if the folder contains anything that does not belong to a report, WorkspaceError if it cannot be written, and the
    errors of `pictures.write`.
    """
    with atomic_folder.replacing(folder, OURS) as fresh, ThreadPoolExecutor(1) as other:
        (fresh / "tables").mkdir()
        # In a thread while this function draws the page, because polars releases the GIL.
        data = other.submit(_write_data, fresh, loaded, summary)
        for text in (markdown, latex):
            text.EXPORT.write(loaded, summary, fresh / "tables", folder / "tables")
        if images:
            (fresh / "figures").mkdir()
            pictures.write(fresh / "figures", page.drawings(loaded, summary), images, "collect summarize --images")
        files.write_atomic(fresh / PAGE, page.draw(loaded, summary, shown_in or folder, workspace.runs).encode())
        data.result()


def _write_data(fresh: Path, loaded: Loaded, summary: Summary) -> None:
    flat_tables.write_parquet(flat_tables.steps(loaded), fresh / "tables" / "steps.parquet")
    files.write_document(fresh / "summary.json", summary)
    cells = flat_tables.summary(summary)
    flat_tables.write_csv(cells, fresh / "tables" / "summary.csv")
    flat_tables.write_parquet(cells, fresh / "tables" / "summary.parquet")
