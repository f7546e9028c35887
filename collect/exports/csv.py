"""Exports the tables as CSV, which every program can read. A missing value is an empty field."""

from __future__ import annotations

from pathlib import Path

from collect import flat_tables
from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.summary import Summary


def write_tables(loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one CSV file for each table."""
    for name, frame in flat_tables.make_frames(loaded, summary).items():
        flat_tables.write_csv(frame, folder / f"{name}.csv")


EXPORT = Export(
    name="csv",
    summary="the tables summary, steps and samples, as text that every program reads",
    written_names=frozenset({"summary.csv", "steps.csv", "samples.csv"}),
    write=write_tables,
)
