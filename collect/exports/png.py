"""PNG: the report's figures as pictures, two pixels for each of the page, one file each."""

from __future__ import annotations

from pathlib import Path

from collect import page, pictures
from collect.export import Export
from collect.load import Loaded
from collect.summary import Summary

FOLDER = "figures"


def write(loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    (folder / FOLDER).mkdir()
    pictures.write(folder / FOLDER, page.drawings(loaded, summary), ("png",), "collect export --to png")


EXPORT = Export(
    name="png",
    summary="every figure of the report, as a picture",
    holds=frozenset({FOLDER}),
    write=write,
    extra="images",
    package="kaleido",
)
