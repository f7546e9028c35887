"""What files a run consists of, with their SHA-256: so that a result that changed afterwards cannot pass unnoticed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shardlab import files
from shardlab.decoders import decoder
from shardlab.errors import InputError
from shardlab.rundir import RunDir

NAME = "manifest.json"
SCHEMA = 1


class File(msgspec.Struct, frozen=True):
    """A file at the time it was hashed; mtime_ns is since the epoch."""

    bytes: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct):
    """manifest.json. complete: the run had ended, so that nothing in it has a reason to change."""

    schema: int
    run_id: str
    files: dict[str, File]
    complete: bool


class Difference(msgspec.Struct):
    """How a finished run differs from its manifest. hashed: how many files had to be read to know."""

    changed: list[str] = []
    vanished: list[str] = []
    added: list[str] = []
    hashed: int = 0

    @property
    def problems(self) -> list[str]:
        """One clause for each file that is not what it was."""
        return [f"{name}: its content changed" for name in self.changed] + [f"{name}: it vanished" for name in self.vanished]


def read(run: RunDir) -> Manifest | None:
    """The manifest of a run, or None where it has none. Raises InputError for one that is damaged."""
    path = run.path / NAME
    try:
        return decoder(Manifest).decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not a manifest of this version: {error}; remove it to make a new one.") from None


def write(run: RunDir, manifest: Manifest) -> None:
    files.write_json(run.path / NAME, manifest)


def make(run: RunDir, *, complete: bool) -> Manifest:
    """Hash every file of a run. Raises WorkspaceError where one cannot be read."""
    with files.as_workspace_error("read"):
        found = {name: _hash(run.path / name, status) for name, status in _listing(run.path)}
    return Manifest(SCHEMA, run.run_id, found, complete)


def compare(run: RunDir, old: Manifest) -> tuple[Manifest, Difference]:
    """(the run as it is, how that differs from `old`); only files whose size or time changed are read again.

    An event file that grew is no difference: it is written to by appending, also after the end of a run.
    """
    difference = Difference()
    now: dict[str, File] = {}
    with files.as_workspace_error("read"):
        for name, status in _listing(run.path):
            before = old.files.get(name)
            if before and (before.bytes, before.mtime_ns) == (status.st_size, status.st_mtime_ns):
                now[name] = before
                continue
            now[name] = _hash(run.path / name, status)
            difference.hashed += 1
            if before is None:
                difference.added.append(name)
            elif now[name].sha256 != before.sha256 and not _only_grew(run.path / name, before):
                difference.changed.append(name)
    difference.vanished = sorted(old.files.keys() - now.keys())
    return Manifest(SCHEMA, run.run_id, now, True), difference


def _only_grew(path: Path, before: File) -> bool:
    if not (path.name.startswith("events.") and path.suffix == ".jsonl"):
        return False
    with path.open("rb") as handle:
        return hashlib.sha256(handle.read(before.bytes)).hexdigest() == before.sha256


def _listing(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(path within the folder, its status) of every regular file, ordered; links and temporaries are not part of a run."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            status = path.lstat()
            hidden = name.startswith(".") or (name == NAME and path.parent == folder)
            if stat.S_ISREG(status.st_mode) and not hidden:
                yield path.relative_to(folder).as_posix(), status


def _hash(path: Path, status: os.stat_result) -> File:
    """The digest with the size and time that were seen before reading: a later change then shows in them."""
    return File(status.st_size, status.st_mtime_ns, files.sha256(path))
