"""Writes the zip file of an archive. Equal content gives an equal file."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardlab import archive, files
from shardlab.archive import ArchivedFile, ArchiveIndex, LeftOut
from shardlab.errors import InputError

FIRST = (1980, 1, 1, 0, 0, 0)  # the earliest time that zip can store; every file gets it
STORED = (".gz", ".png", ".parquet")  # files that are compressed already


def must_be_replaceable(out: Path) -> None:
    """Raise InputError if there is a file at `out` that is not an archive, because it would be lost."""
    if not out.exists() and not out.is_symlink():
        return
    try:
        archive.read_index(out)
    except InputError:
        raise InputError(
            f"{out}: is there already and is not an archive. Allowed with --out: a new file, or an archive."
        ) from None


def index(folder: Path, matrix: str, runs: Sequence[str], left_out: Sequence[LeftOut], *, anonymous: bool) -> ArchiveIndex:
    """The index of an archive with the files of a folder. runs: the ids of the runs in the folder."""
    from shardlab import __version__

    listed = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and archive.may_contain(name):
            listed[archive.INSIDE + name] = ArchivedFile(path.stat().st_size, files.sha256(path))
    matrices = [name.removeprefix(archive.INSIDE) for name in listed if name.startswith(f"{archive.INSIDE}matrix/")]
    return ArchiveIndex(
        schema=archive.SCHEMA,
        shardlab=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        matrix=matrix,
        matrix_file=next((name for name in matrices if name.endswith((".yaml", ".yml"))), None),
        anonymous=anonymous,
        runs=list(runs),
        files=listed,
        left_out=list(left_out),
    )


def write(out: Path, folder: Path, described: ArchiveIndex) -> int:
    """Write the archive of a folder to `out`, completely or not at all. Returns its size in bytes. Raises WorkspaceError."""
    with files.writing(out) as handle, zipfile.ZipFile(handle, "w", zipfile.ZIP_DEFLATED) as zipped:
        with zipped.open(_entry(archive.INDEX), "w") as member:
            member.write(files.as_json(described))
        for name in described.files:
            path = folder / name.removeprefix(archive.INSIDE)
            with path.open("rb") as source, zipped.open(_entry(name), "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, archive.BLOCK)
    return out.stat().st_size


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, FIRST)
    entry.compress_type = zipfile.ZIP_STORED if name.endswith(STORED) else zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry
