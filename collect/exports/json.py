"""Exports the whole summary as JSON, the same document as report/summary.json and the output of `collect summarize --json`."""

from __future__ import annotations

from pathlib import Path

from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from shardlab.files import files


def write_summary(_loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one JSON file with the whole summary."""
    files.write_document(folder / "summary.json", summary)


EXPORT = Export(
    name="json", summary="the whole summary as one document", written_names=frozenset({"summary.json"}), write=write_summary
)
