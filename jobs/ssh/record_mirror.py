"""Copies the records of a run from a node to the first node while the run goes on, if the nodes share no folder.

The first node judges the run, shows its progress and detects hangs by these copies. Telemetry, traces and the tensors of
checkpoints stay on the node until `collect fetch` gathers them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from jobs.hang_detection import files_of
from shardlab import files, part_files
from shardlab.errors import ShardlabError

PART = 1 << 16  # bytes of a file in one line
MOST_LINE = 1 << 26  # bytes; the manifest of a checkpoint is one line
# Only these may be written on the first node, whatever a node sends. Appended to: copied as they grow.
APPENDED = re.compile(rf"(?:{part_files.EVENTS}|steps/{part_files.STEPS}|validation\.jsonl|log/rank-\d{{5,}}\.log)")
WHOLE = re.compile(rf"(?:result\.json|env/{part_files.HOST}\.json|checkpoints/step-\d{{8,}}/manifest\.json)")
FOLDERS = ("", "steps", "log", "env")
PROGRESS = ".progress."  # begins the name of a hidden file on the first node, whose time says when a node made progress


class RecordChange(msgspec.Struct, frozen=True):
    """What changed on a node. name: of a file in the run's folder, or "" if another file changed. content: None if the file
    was removed. begin: the place of the content in a file that is appended to."""

    name: str
    content: bytes | None = b""
    begin: Annotated[int, msgspec.Meta(ge=0)] = 0


class RecordReader:
    """Finds what changed in a node's part of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, int]] = {}  # (inode, bytes that were read) by name
        self._seen: frozenset[tuple[str, int, int]] = frozenset()

    def changes(self) -> Iterator[RecordChange]:
        """What changed since the last call. result.json comes last: it says that the other records are complete."""
        names = sorted(self._names(), key=lambda name: name == "result.json")
        for gone in self._read.keys() - set(names):
            del self._read[gone]
            yield RecordChange(gone, None)
        for name in names:
            with contextlib.suppress(OSError):  # a checkpoint that is removed meanwhile
                yield from self._added(name)
        now = frozenset(files_of(self._folder, ask=False))
        if now != self._seen:
            self._seen = now
            yield RecordChange("")

    def _names(self) -> Iterator[str]:
        for folder in FOLDERS:
            for entry in files.names(self._folder / folder):
                name = f"{folder}/{entry}" if folder else entry
                if APPENDED.fullmatch(name) or WHOLE.fullmatch(name):
                    yield name
        for entry in files.names(self._folder / "checkpoints"):
            name = f"checkpoints/{entry}/manifest.json"
            if WHOLE.fullmatch(name) and (self._folder / name).exists():
                yield name

    def _added(self, name: str) -> Iterator[RecordChange]:
        with files.open_regular(self._folder / name) as handle:
            status = os.fstat(handle.fileno())
            inode, done = self._read.get(name, (status.st_ino, 0))
            if inode != status.st_ino or done > status.st_size:  # replaced, as at a resume
                done = 0
            if WHOLE.fullmatch(name):
                if name not in self._read or not done:
                    yield RecordChange(name, content := handle.read())
                    self._read[name] = (status.st_ino, len(content))
                return
            handle.seek(done)
            while part := handle.read(PART):
                yield RecordChange(name, part, done)
                done += len(part)
                self._read[name] = (status.st_ino, done)


class RecordCopies:
    """The copies on the first node of what the nodes of one run send."""

    def __init__(self, folder: Path) -> None:
        """folder: of the run. It has no records yet except those that this machine writes itself, as a node of the run."""
        self._folder = folder
        self._owners: dict[str, str] = {}  # the node that writes a file, by the file's name

    def apply(self, node: str, change: RecordChange) -> None:
        """Make the same change on the first node. Raises ShardlabError for a file or a place that this node may not write."""
        if change.name == "":
            with files.as_workspace_error("write"):
                (self._folder / f"{PROGRESS}{node}").touch()
            return
        path = self._folder / change.name
        if not (APPENDED.fullmatch(change.name) or WHOLE.fullmatch(change.name)):
            raise ShardlabError(f"{node}: sent the file {change.name[:100]!r}, which is not a record of a run.")
        self._must_own(node, path, change.name)
        if change.content is None:
            _remove(path)
            return
        files.make_folder(path.parent)
        if WHOLE.fullmatch(change.name):
            files.write_atomic(path, change.content)
        else:
            _append(node, path, change.content, change.begin)

    def _must_own(self, node: str, path: Path, name: str) -> None:
        """Raises ShardlabError if another node writes this file: each file of records has one writer."""
        owner = self._owners.get(name, "the first node" if path.exists() else node)
        if owner != node:
            raise ShardlabError(
                f"{node}: sent the file {name}, which {owner} writes. If both nodes have one host name, change one of them."
            )
        self._owners[name] = node


def _append(node: str, path: Path, content: bytes, begin: int) -> None:
    """Write what follows the first `begin` bytes of a file. Raises ShardlabError if the file does not have so many bytes."""
    with files.as_workspace_error("write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as handle:
            if begin > (size := os.fstat(descriptor).st_size):
                raise ShardlabError(f"{node}: sent byte {begin} of {path.name}, of which this node has {size} bytes.")
            handle.seek(begin)
            handle.write(content)
            handle.truncate()  # a file that was replaced on the node may be shorter


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if path.parent.parent.name == "checkpoints":
        with contextlib.suppress(OSError):  # the first node's own part of the checkpoint is still there
            path.parent.rmdir()
