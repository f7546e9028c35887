"""Writes the report of a matrix into a folder, completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collect import atomic_folder, flat_tables
from collect.exports import latex, markdown
from collect.reading.load import LoadedMatrix
from collect.report import page, pictures
from collect.summary import Summary
from shardlab.files import files
from shardlab.workspace.workspace import Workspace

PAGE = "index.html"
REPORT_NAMES = frozenset({PAGE, "summary.json", "tables", "figures"})


def write_report(
    folder: Path,
    workspace: Workspace,
    loaded: LoadedMatrix,
    summary: Summary,
    images: Sequence[str] = (),
    opened_in: Path | None = None,
) -> None:
    """Write the report into `folder`: index.html, summary.json, tables/ and, if `images` names formats, figures/.

    images: formats of image files in which all figures are also written, such as `png`.

    opened_in: the folder in which readers open the report, if it is not `folder`; links to runs are relative to `opened_in`.

    If the process is killed, the folder contains either the complete earlier report or the complete new report. Raises
    InputError if the folder contains anything that does not belong to a report, WorkspaceError if it cannot be written, and the
    errors of `pictures.write_tables`.
    """
    with atomic_folder.replace_folder(folder, REPORT_NAMES) as new_folder, ThreadPoolExecutor(1) as executor:
        (new_folder / "tables").mkdir()
        # In a thread while this function draws the page, because polars releases the GIL.
        data_writing = executor.submit(_write_data, new_folder, loaded, summary)
        for text_export in (markdown, latex):
            text_export.EXPORT.write(loaded, summary, new_folder / "tables", folder / "tables")
        if images:
            (new_folder / "figures").mkdir()
            pictures.write(new_folder / "figures", page.draw_figures(loaded, summary), images, "collect summarize --images")
        files.write_atomic(new_folder / PAGE, page.draw_page(loaded, summary, opened_in or folder, workspace.runs).encode())
        data_writing.result()


def _write_data(new_folder: Path, loaded: LoadedMatrix, summary: Summary) -> None:
    flat_tables.write_parquet(flat_tables.make_steps_frame(loaded), new_folder / "tables" / "steps.parquet")
    files.write_document(new_folder / "summary.json", summary)
    cell_table = flat_tables.make_summary_frame(summary)
    flat_tables.write_csv(cell_table, new_folder / "tables" / "summary.csv")
    flat_tables.write_parquet(cell_table, new_folder / "tables" / "summary.parquet")
