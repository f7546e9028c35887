"""SVG: the report's figures as drawings that keep their lines at any size, one file each."""

from __future__ import annotations

from pathlib import Path

from collect import page, pictures
from collect.export import Export
from collect.load import Loaded
from collect.summary import Summary

FOLDER = "figures"


def write(loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    (folder / FOLDER).mkdir()
    pictures.write(folder / FOLDER, page.drawings(loaded, summary), ("svg",), "collect export --to svg")


EXPORT = Export(
    name="svg",
    summary="every figure of the report, as a drawing that scales",
    holds=frozenset({FOLDER}),
    write=write,
    extra="images",
    package="kaleido",
)
