"""The manifest of a run: its files with their SHA-256. It shows whether a result was changed later."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError
from shardlab.rundir import RunDir

NAME = "manifest.json"
SCHEMA = 1
BLOCK = 1 << 20  # bytes that are hashed at a time
MOST_NAME = 1000  # characters of a file's name


class ManifestFile(msgspec.Struct, frozen=True):
    """A file at the time it was hashed; mtime_ns is since the epoch."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class RunManifest(msgspec.Struct):
    """manifest.json. complete: the run had ended, so that nothing in it has a reason to change."""

    schema: int
    run_id: str
    files: dict[str, ManifestFile]
    complete: bool

    def has_same_content(self, other: RunManifest) -> bool:
        """Whether it has every file of `other` with the same content, and the run had ended or not as in `other`."""
        same = all(name in self.files and self.files[name].sha256 == file.sha256 for name, file in other.files.items())
        return same and self.complete == other.complete


class Listing(msgspec.Struct):
    """What is in the folder of a run. regular: its files. other: maps the names of entries that a manifest cannot contain to
    their kinds: entries that are neither regular files nor folders, and entries whose names are not valid UTF-8."""

    regular: dict[str, os.stat_result] = {}
    other: dict[str, str] = {}


class ManifestDifference(msgspec.Struct):
    """How a finished run differs from its manifest. hashed: how many files had to be read to know."""

    changed: list[str] = []
    vanished: list[str] = []
    added: list[str] = []
    hashed: int = 0

    @property
    def problems(self) -> list[str]:
        """One clause for each file that changed or is missing."""
        changed = [f"{name}: its content changed" for name in self.changed]
        return changed + [f"{name}: the file is missing" for name in self.vanished]


def read(run: RunDir) -> RunManifest | None:
    """The manifest of a run, or None if it has none. Raises InputError for one that is damaged."""
    path = run.path / NAME
    try:
        return decoder(RunManifest).decode(files.read(path))
    except FileNotFoundError:
        return None
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: is not a manifest of this version: {error}; remove it to make a new one.") from None


def received(content: bytes, run_id: str) -> RunManifest:
    """A manifest that another machine made for this run, whose names may become paths here. Raises InputError."""
    try:
        found = decoder(RunManifest).decode(content)
    except DECODE_FAULTS as error:
        raise InputError(f"the cluster's manifest is not of this version ({error})") from None
    check_received(found, run_id)
    return found


def check_received(found: RunManifest, run_id: str) -> None:
    """Raises InputError for a manifest of another machine that is not of this run, or whose names cannot be paths here."""
    if found.schema != SCHEMA or found.run_id != run_id:
        raise InputError(
            f"the cluster's manifest has schema {found.schema} and run id {found.run_id!r}. Expected: {SCHEMA} and {run_id!r}"
        )
    folders = {name[:end] for name in found.files for end in range(len(name)) if name[end] == "/"}
    for name in found.files:
        if not _is_name(name) or name in folders:
            raise InputError(f"the cluster's manifest names {name[:100]!r}, which is not a valid file name in a run")


def _is_name(name: str) -> bool:
    """Whether a file of a run may have this name. Not allowed are names outside of the run's folder, the name of the manifest,
    and hidden names, because hidden files are temporary and not part of a run."""
    parts = name.split("/")
    return (
        parts[0] != NAME
        and len(name) <= MOST_NAME
        and name.isprintable()
        and not any(part == "" or part.startswith(".") for part in parts)
    )


def write(run: RunDir, manifest: RunManifest) -> None:
    """Write manifest.json of a run."""
    files.write_json(run.path / NAME, manifest)


def make(run: RunDir, listing: Listing, *, complete: bool, known: RunManifest | None = None) -> RunManifest:
    """Hash every file of a run. Raises WorkspaceError if one cannot be read.

    known: a manifest whose digests hold for the files that have the size and the time that stand there.
    """
    hashes: dict[str, ManifestFile] = {}
    with files.as_workspace_error("read"):
        for name, status in listing.regular.items():
            before = known.files.get(name) if known else None
            try:
                hashes[name] = before if before and is_as_it_was(before, status) else hashed(run.path / name, status)
            except FileNotFoundError:  # a run that goes on removed it
                continue
    return RunManifest(SCHEMA, run.run_id, hashes, complete)


def compare(run: RunDir, listing: Listing, old: RunManifest) -> tuple[RunManifest, ManifestDifference]:
    """(the run as it is, how that differs from `old`); only files whose size or time changed are read again.

    An event file that grew is no difference: it is written to by appending, also after the end of a run.
    """
    difference = ManifestDifference()
    now: dict[str, ManifestFile] = {}
    with files.as_workspace_error("read"):
        for name, status in listing.regular.items():
            before = old.files.get(name)
            if before and is_as_it_was(before, status):
                now[name] = before
                continue
            now[name] = hashed(run.path / name, status)
            difference.hashed += 1
            if before is None:
                difference.added.append(name)
            elif now[name].sha256 != before.sha256 and not only_grew(run.path / name, before):
                difference.changed.append(name)
    difference.vanished = sorted(old.files.keys() - now.keys())
    return RunManifest(SCHEMA, run.run_id, now, True), difference


def list_files(run: RunDir) -> Listing:
    """What is in a run's folder, in the order of the names, without hidden files and folders, which are temporary.

    Raises WorkspaceError if a folder cannot be read.
    """
    listing = Listing()
    with files.as_workspace_error("read"):
        _list(run.path, "", listing)
    return listing


def is_as_it_was(file: ManifestFile, status: os.stat_result) -> bool:
    """Whether a file has the size and the time that it had when it was hashed."""
    return (file.bytes, file.mtime_ns) == (status.st_size, status.st_mtime_ns)


def hashed(path: Path, status: os.stat_result) -> ManifestFile:
    """The digest with the size and time that were seen before reading: a later change then shows in them."""
    return ManifestFile(status.st_size, status.st_mtime_ns, digest(path))


def digest(path: Path, length: int | None = None) -> str:
    """The SHA-256 of a regular file, or of its first `length` bytes. Raises OSError, NotRegular for anything else."""
    with files.open_regular(path) as handle:
        if length is None:
            return hashlib.file_digest(handle, "sha256").hexdigest()
        found = hashlib.sha256()
        while length and (block := handle.read(min(BLOCK, length))):
            found.update(block)
            length -= len(block)
        return found.hexdigest()


def regular(folder: Path, name: str) -> os.stat_result | None:
    """The status of a regular file in a run's folder, None if there is nothing of that name.

    Raises NotRegular if it is no regular file, or if a folder on the way to it, the run's own included, is no folder.
    """
    path = str(folder)
    for part in name.split("/"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(mode):
            raise files.NotRegular(path, files.kind_of(mode))
        path = f"{path}/{part}"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise files.NotRegular(path, files.kind_of(status.st_mode))
    return status


def only_grew(path: Path, before: ManifestFile) -> bool:
    """Whether a file is one of events, and begins with all that it held when it was hashed."""
    if not (path.name.startswith("events.") and path.suffix == ".jsonl"):
        return False
    return digest(path, before.bytes) == before.sha256


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _list(folder: Path, prefix: str, listing: Listing) -> None:
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except FileNotFoundError:  # a run that goes on removed it
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or name == NAME:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not _is_text(entry.name):
            listing.other[name] = f"{files.kind_of(status.st_mode)} whose name is not valid UTF-8"
        elif stat.S_ISREG(status.st_mode):
            listing.regular[name] = status
        elif stat.S_ISDIR(status.st_mode):
            _list(folder / entry.name, f"{name}/", listing)
        else:
            listing.other[name] = files.kind_of(status.st_mode)
