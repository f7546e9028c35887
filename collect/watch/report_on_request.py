"""Writes the report of a workspace when a browser requests it. The report is in a temporary folder, not in the workspace."""

from __future__ import annotations

import threading
from pathlib import Path

from collect import write_report
from collect.loading.load import load
from collect.summary import summarize
from shardlab import gc_pause
from shardlab.workspace import Workspace


class ReportOnRequest:
    """The report of the last matrix of a workspace, as `collect summarize` writes it.

    folder: the folder in which the folder `report` is created.
    """

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.folder = folder / "report"
        self._workspace = workspace
        self._lock = threading.Lock()

    def draw(self) -> None:
        """Write the report again. Raises ShardlabError, such as InputError if no matrix was submitted in this workspace."""
        with self._lock, gc_pause.not_searched():
            loaded = load(self._workspace, None)
            summary = summarize(loaded, loaded.expansion.baseline)
            write_report.write(self.folder, self._workspace, loaded, summary, shown_in=self._workspace.report)
