"""The format of an archive: one zip file with the runs of a matrix, the matrix, the cluster, the report and all checksums.

`collect archive` writes an archive; `collect open`, `collect compare` and `jobs submit --from` read it. An archive comes from
another person, so nothing in it is trusted: names, sizes and checksums are checked before a file is used.

    archive.json                     ArchiveIndex: what the archive contains, and what was left out
    workspace/matrix/                the matrix file, with the model files that it names
    workspace/archived-cluster.yaml  the cluster file, without secrets; not named cluster.yaml, so that no command uses it
    workspace/environment.json       the software and the machines of the runs
    workspace/.shardlab/matrices/    the expansion of the matrix
    workspace/runs/                  the run folders
    workspace/{workloads,strategies,metrics}/   code of the workspace
    workspace/commands/              for each command, the files in its folder as DIGEST.tar.gz
    workspace/report/                the report
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files, plugin_source
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.record_types import MatrixName, RunId, Sha256

SCHEMA = 1
ARCHIVE_SUFFIX = ".shardlab.zip"
INDEX_FILE = "archive.json"
WORKSPACE_PREFIX = "workspace/"  # the folder in an archive that contains all files except archive.json
CLUSTER_FILE = "archived-cluster.yaml"
ENVIRONMENT_FILE = "environment.json"
BLOCK_BYTES = 1 << 20  # bytes that are read at a time
MOST_INDEX_BYTES = 1 << 28  # the largest allowed size of archive.json, in bytes
# An archive.json with more bytes than this and INDEX_RATIO times the bytes of the archive is not read, so that a small archive
# cannot take much memory. Each file of an archive takes at most twice as many bytes there as in the zip file.
LEAST_INDEX, INDEX_RATIO = 1 << 20, 8
MOST_FILES = 2_000_000
# The files and folders that an archive may contain. A file cluster.yaml and a folder of templates are not allowed: they could
# make commands in the unpacked workspace log in to machines, or run a script, that the author of the archive chose.
ALLOWED_FILES = {CLUSTER_FILE, ENVIRONMENT_FILE}
COMMANDS_FOLDER = "commands/"
_FOLDERS_OF_CODE = tuple(f"{name}/" for name in plugin_source.CODE_FOLDERS)
ALLOWED_FOLDERS = ("matrix/", "runs/", "report/", ".shardlab/matrices/", COMMANDS_FOLDER, *_FOLDERS_OF_CODE)
MOST_NAME_LENGTH = 1000  # the largest allowed number of characters in the path of a file
MOST_PATH_PARTS = 32  # the largest allowed number of folders in the path of a file, each of which takes room on the disk
ALLOWED_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the methods of compression that an archive may use
ENCRYPTED_FLAG = 0x1  # the flag bit of an encrypted member in a zip file
# The exceptions of zipfile for a damaged file: a wrong checksum, a truncated or impossible structure, an unknown version.
ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, UnicodeDecodeError)

ByteCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # in bytes


class ArchivedFile(msgspec.Struct, frozen=True):
    """A file in an archive."""

    bytes: ByteCount
    """The size of the file, uncompressed."""
    sha256: Sha256


class LeftOutFile(msgspec.Struct, frozen=True):
    """A file of the workspace that is not in the archive."""

    name: str
    """The path of the file, relative to the workspace."""
    bytes: int | None
    """The size of the file; None: not known."""
    why: str
    """Why the file is not in the archive, as a clause."""


class ArchiveIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The content of archive.json."""

    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)]
    shardlab: Annotated[str, msgspec.Meta(max_length=64)]
    """The version of shardlab that wrote the archive."""
    created: Annotated[str, msgspec.Meta(max_length=64)]
    """The time when the archive was written (ISO 8601, UTC)."""
    matrix: MatrixName
    """The name of the matrix."""
    matrix_file: str | None
    """The path of the matrix file below `workspace/`; None: it was left out."""
    anonymous: bool
    """Whether names of users, hosts, accounts, sites and paths were replaced."""
    runs: list[RunId]
    """The ids of the runs."""
    files: dict[str, ArchivedFile]
    """All files except archive.json, by their path in the archive."""
    left_out: list[LeftOutFile]


def read_index(archive_path: Path) -> ArchiveIndex:
    """Read and check archive.json in the archive `archive_path`. Raises InputError if the file is not a valid archive."""
    with _open_archive(archive_path) as archive_zip:
        return _read_valid_index(archive_path, archive_zip)


def unpack_archive(archive_path: Path, folder: Path, is_wanted: Callable[[str], bool] = lambda _name: True) -> ArchiveIndex:
    """Check the size and the SHA-256 of each file of the archive `archive_path`, and write the wanted files into an empty
    folder.

    folder: the empty folder; a file `workspace/NAME` of the archive becomes `NAME` in it. is_wanted: is called with the path of
    each file below `workspace/`; returns whether to write this file.

    Raises InputError if the archive is damaged or is not valid, and WorkspaceError if a file cannot be written; the caller then
    removes the folder.
    """
    with _open_archive(archive_path) as archive_zip:
        archive_index = _read_valid_index(archive_path, archive_zip)
        wanted_names = {name for name in archive_index.files if is_wanted(name.removeprefix(WORKSPACE_PREFIX))}
        _check_free_space(archive_path, folder, sum(archive_index.files[name].bytes for name in wanted_names))
        for name, expected_file in archive_index.files.items():
            target_path = folder / name.removeprefix(WORKSPACE_PREFIX) if name in wanted_names else None
            _check_and_write(archive_path, archive_zip, name, expected_file, target_path)
        return archive_index


def may_contain(inner_path: str) -> bool:
    """Whether an archive may contain a file with this path. inner_path: the path below the folder `workspace/` of the
    archive."""
    return _is_allowed_name(WORKSPACE_PREFIX + inner_path)


@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive for reading. Errors of zipfile in the block become InputError."""
    try:
        with files.open_regular(path) as archive_file, zipfile.ZipFile(archive_file) as archive_zip:
            yield archive_zip
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Allowed: an archive, as `collect archive` writes it.") from None
    except ZIP_FAULTS as error:
        raise InputError(f"{path}: is not an archive, or is damaged: {error}. Get the file again from its author.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error


def _read_valid_index(path: Path, archive_zip: zipfile.ZipFile) -> ArchiveIndex:
    zip_entries = archive_zip.infolist()
    member_names = [entry.filename for entry in zip_entries]
    if INDEX_FILE not in member_names or len(member_names) > MOST_FILES:
        raise InputError(f"{path}: contains no {INDEX_FILE}. Allowed: an archive, as `collect archive` writes it.")
    for entry in zip_entries:
        if entry.compress_type not in ALLOWED_METHODS or entry.flag_bits & ENCRYPTED_FLAG:
            raise InputError(f"{path}: {entry.filename[:100]!r} is encrypted, or compressed in a way that archives do not use.")
    max_index_bytes = min(MOST_INDEX_BYTES, LEAST_INDEX + INDEX_RATIO * path.stat().st_size)
    index_bytes = _read_member(archive_zip, INDEX_FILE, max_index_bytes)
    try:
        index = get_decoder(ArchiveIndex).decode(index_bytes)
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: {INDEX_FILE} is not of this version: {error}.") from None
    for name in index.files:
        if not _is_allowed_name(name):
            raise InputError(f"{path}: names the file {name[:100]!r}, which is not a valid path in an archive.")
    # In this order, a file `a` and a file `a/b` are neighbours. A set of all folders would take much more memory than names.
    for name, next_name in pairwise(sorted(index.files, key=lambda name: name.replace("/", "\0"))):
        if next_name.startswith(f"{name}/"):
            raise InputError(f"{path}: {name[:100]!r} is both a file and a folder.")
    if sorted(member_names) != sorted([INDEX_FILE, *index.files]):
        differing_names = sorted({*member_names} ^ {INDEX_FILE, *index.files}) or ["one of them twice"]
        raise InputError(f"{path}: its files are not those that {INDEX_FILE} lists: {differing_names[0][:100]!r}.")
    if index.matrix_file is not None and WORKSPACE_PREFIX + index.matrix_file not in index.files:
        raise InputError(f"{path}: does not contain the matrix file {index.matrix_file[:100]!r} that {INDEX_FILE} names.")
    return index


def _is_allowed_name(name: str) -> bool:
    """Whether an archive may contain a file with this path.

    The path must be in TOP_FILES or FOLDERS, must not lead out of its folder, and must contain only printable characters.
    """
    if not name.startswith(WORKSPACE_PREFIX) or len(name) > MOST_NAME_LENGTH or not name.isprintable() or "\\" in name:
        return False
    inner_path = name.removeprefix(WORKSPACE_PREFIX)
    path_parts = inner_path.removeprefix(".shardlab/").split("/")
    if len(path_parts) > MOST_PATH_PARTS or not (inner_path in ALLOWED_FILES or inner_path.startswith(ALLOWED_FOLDERS)):
        return False
    return all(path_part and not path_part.startswith(".") and len(path_part.encode()) <= 255 for path_part in path_parts)


def _check_free_space(archive_path: Path, folder: Path, needed_bytes: int) -> None:
    disk_status = os.statvfs(folder)
    free_bytes = disk_status.f_bavail * disk_status.f_frsize
    if needed_bytes > free_bytes:
        raise InputError(
            f"{archive_path}: its files have {needed_bytes / 2**30:,.1f} GiB, and {folder.parent} has "
            f"{free_bytes / 2**30:,.1f} GiB free. "
            "Allowed: a folder on a disk with more free space."
        )


def _read_member(archive_zip: zipfile.ZipFile, member_name: str, most_bytes: int) -> bytes:
    with archive_zip.open(member_name) as member_file:
        member_bytes = member_file.read(most_bytes + 1)
    if len(member_bytes) > most_bytes:
        raise InputError(f"{member_name}: has more than {most_bytes} bytes.")
    return member_bytes


def _check_and_write(
    path: Path, archive_zip: zipfile.ZipFile, name: str, expected_file: ArchivedFile, target_path: Path | None
) -> None:
    """Check a file of an archive against archive.json, and write it to `target_path` unless `target_path` is None.

    At most the stated size is written, so that a small archive cannot fill the disk. path: the archive. name: the path of the
    file in the archive. expected_file: its size and SHA-256 according to archive.json.
    """
    sha256, bytes_left = hashlib.sha256(), expected_file.bytes
    with files.as_workspace_error("write"):
        if target_path is not None:
            target_path.parent.mkdir(parents=True, exist_ok=True)
        with (
            archive_zip.open(name) as member,
            contextlib.nullcontext() if target_path is None else target_path.open("xb") as target_file,
        ):
            while member_block := member.read(min(BLOCK_BYTES, bytes_left + 1)):
                bytes_left -= len(member_block)
                if bytes_left < 0:
                    break
                sha256.update(member_block)
                if target_file is not None:
                    target_file.write(member_block)
    if bytes_left or sha256.hexdigest() != expected_file.sha256:
        raise InputError(
            f"{path}: {name} has not the size and the SHA-256 that {INDEX_FILE} states: the archive is damaged or was changed. "
            "Get the file again from its author."
        )
