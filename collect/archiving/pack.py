"""Writes the zip file of an archive. Two archives with the same content have equal zip files, byte by byte."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardlab import __version__
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.workspace import archive
from shardlab.workspace.archive import ArchivedFile, ArchiveIndex, LeftOutFile

EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)  # the time that every file gets in the archive: the earliest time that zip can store
STORED_SUFFIXES = (".gz", ".png", ".parquet")  # of files that are already compressed, so that zip stores them as they are


def must_be_replaceable(out: Path) -> None:
    """Raise InputError if a file exists at `out` that is not an archive, because the new archive would overwrite this file."""
    if not out.exists() and not out.is_symlink():
        return
    try:
        archive.read_index(out)
    except InputError:
        raise InputError(
            f"{out}: is there already and is not an archive. Allowed with --out: a new file, or an archive."
        ) from None


def build_index(
    folder: Path, matrix: str, runs: Sequence[str], left_out: Sequence[LeftOutFile], *, anonymous: bool
) -> ArchiveIndex:
    """Make the index (archive.json) of an archive of all files in `folder`. anonymous: whether names were replaced."""
    archived_files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and archive.may_contain(name):
            archived_files[archive.WORKSPACE_PREFIX + name] = ArchivedFile(path.stat().st_size, files.file_sha256(path))
    workspace_paths = (name.removeprefix(archive.WORKSPACE_PREFIX) for name in archived_files)
    return ArchiveIndex(
        schema=archive.SCHEMA,
        shardlab=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        matrix=matrix,
        matrix_file=next((path for path in workspace_paths if re.fullmatch(r"matrix/.*\.ya?ml", path)), None),
        anonymous=anonymous,
        runs=list(runs),
        files=archived_files,
        left_out=list(left_out),
    )


def write_zip(out: Path, folder: Path, archive_index: ArchiveIndex) -> int:
    """Write the files of `folder` that the index names to `out`, completely or not at all. Returns the size in bytes.

    Raises WorkspaceError if `out` cannot be written.
    """
    with files.open_atomic(out) as handle, zipfile.ZipFile(handle, "w", zipfile.ZIP_DEFLATED) as zip_file:
        with zip_file.open(_build_entry(archive.INDEX_FILE), "w") as member:
            member.write(files.encode_json(archive_index))
        for name in archive_index.files:
            path = folder / name.removeprefix(archive.WORKSPACE_PREFIX)
            with files.open_regular(path) as source, zip_file.open(_build_entry(name), "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, archive.BLOCK_BYTES)
    return out.stat().st_size


def _build_entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EARLIEST_TIME)
    entry.compress_type = zipfile.ZIP_STORED if name.endswith(STORED_SUFFIXES) else zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry
