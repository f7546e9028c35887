"""Write the report's folder, all of it or nothing."""

from __future__ import annotations

from pathlib import Path

from collect import page, swap, tables
from collect.exports import latex, markdown
from collect.load import Loaded
from collect.summary import Summary
from shardlab import files
from shardlab.workspace import Workspace

PAGE = "index.html"
OURS = frozenset({PAGE, "summary.json", "tables"})


def write(folder: Path, workspace: Workspace, loaded: Loaded, summary: Summary) -> None:
    """index.html, summary.json and tables/. A kill leaves the report that was there, or this one whole.

    Raises InputError where the folder holds what is not of a report, WorkspaceError where it cannot be written.
    """
    with swap.replacing(folder, OURS) as fresh:
        (fresh / "tables").mkdir()
        cells = tables.summary(summary)
        cells.write_csv(fresh / "tables" / "summary.csv")
        cells.write_parquet(fresh / "tables" / "summary.parquet")
        tables.steps(loaded).write_parquet(fresh / "tables" / "steps.parquet")
        for text in (markdown, latex):
            text.EXPORT.write(loaded, summary, fresh / "tables", folder / "tables")
        files.write_json(fresh / "summary.json", summary)
        files.write_atomic(fresh / PAGE, page.draw(loaded, summary, folder, workspace.runs).encode())
