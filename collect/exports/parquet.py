"""Exports the tables as Parquet with typed columns. Of the table formats that were measured, Parquet is the smallest and
fastest."""

from __future__ import annotations

from pathlib import Path

from collect import flat_tables
from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.summary import Summary


def write_tables(loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one Parquet file for each table."""
    for name, frame in flat_tables.make_frames(loaded, summary).items():
        flat_tables.write_parquet(frame, folder / f"{name}.parquet")


EXPORT = Export(
    name="parquet",
    summary="the tables summary, steps and samples, with typed columns; smaller and faster to read than CSV",
    written_names=frozenset({"summary.parquet", "steps.parquet", "samples.parquet"}),
    write=write_tables,
)
