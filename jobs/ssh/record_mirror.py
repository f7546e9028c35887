"""Copies the records of a run from a node to the first node while the run goes on, if the nodes share no folder.

With these copies, the first node decides the state of the run, shows its progress and detects hangs. Telemetry, traces and the
tensors of checkpoints stay on the node until `collect fetch` gathers them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from jobs.node.hang_detection import scan_files
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.runs import part_files

MOST_PART_BYTES = 1 << 16  # the most bytes of a growing file that are sent in one line
MOST_LINE_BYTES = 1 << 26  # the most bytes of a line; large, because the whole manifest of a checkpoint is sent in one line
# The only files that a node may write on the first node. Files of APPENDED_FILES are copied as they grow, files of WHOLE_FILES
# at once.
APPENDED_FILES = re.compile(
    rf"(?:{part_files.EVENT_FILES}|steps/{part_files.STEP_FILES}|validation\.jsonl|log/rank-\d{{5,}}\.log)"
)
WHOLE_FILES = re.compile(rf"(?:result\.json|env/{part_files.HOST_NAME}\.json|checkpoints/step-\d{{8,}}/manifest\.json)")
RECORD_FOLDERS = ("", "steps", "log", "env")
PROGRESS_PREFIX = (
    ".progress."  # prefix of a hidden file on the first node for each node; its time says when the node made progress
)


class RecordChange(msgspec.Struct, frozen=True):
    """A change of a file on a node."""

    name: str
    """The name of a record in the run's folder; "" if a file that is not copied changed."""
    content: bytes | None = b""
    """New content; None if the file was removed."""
    first_byte: Annotated[int, msgspec.Meta(ge=0)] = 0
    """For a file that grows, the byte at which the content begins."""


class RecordReader:
    """Finds what changed in a node's part of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[str, tuple[int, int]] = {}  # for each file by its name: (inode, number of bytes that were read)
        self._file_stats: frozenset[tuple[str, int, int]] = frozenset()

    def read_changes(self) -> Iterator[RecordChange]:
        """Yields the changes since the last call. result.json comes last, because it says that the other records are
        complete."""
        record_names = sorted(self._list_names(), key=lambda record_name: record_name == "result.json")
        for removed_name in self._positions.keys() - set(record_names):
            del self._positions[removed_name]
            yield RecordChange(removed_name, None)
        for record_name in record_names:
            with contextlib.suppress(OSError):  # raised if a checkpoint is removed at this moment
                yield from self._read_added(record_name)
        file_stats = frozenset(scan_files(self._folder, opens_files=False))
        if file_stats != self._file_stats:
            self._file_stats = file_stats
            yield RecordChange("")

    def _list_names(self) -> Iterator[str]:
        for folder in RECORD_FOLDERS:
            for file_name in files.list_names(self._folder / folder):
                relative_name = f"{folder}/{file_name}" if folder else file_name
                if APPENDED_FILES.fullmatch(relative_name) or WHOLE_FILES.fullmatch(relative_name):
                    yield relative_name
        for file_name in files.list_names(self._folder / "checkpoints"):
            relative_name = f"checkpoints/{file_name}/manifest.json"
            if WHOLE_FILES.fullmatch(relative_name) and (self._folder / relative_name).exists():
                yield relative_name

    def _read_added(self, record_name: str) -> Iterator[RecordChange]:
        with files.open_regular(self._folder / record_name) as record_file:
            file_status = os.fstat(record_file.fileno())
            inode, position = self._positions.get(record_name, (file_status.st_ino, 0))
            # the file was replaced, which happens when a run resumes
            if inode != file_status.st_ino or position > file_status.st_size:
                position = 0
            if WHOLE_FILES.fullmatch(record_name):
                if record_name not in self._positions or not position:
                    yield RecordChange(record_name, content := record_file.read())
                    self._positions[record_name] = (file_status.st_ino, len(content))
                return
            record_file.seek(position)
            while added_bytes := record_file.read(MOST_PART_BYTES):
                yield RecordChange(record_name, added_bytes, position)
                position += len(added_bytes)
                self._positions[record_name] = (file_status.st_ino, position)


class RecordCopies:
    """Writes the records that the nodes of one run send into the run's folder on the first node."""

    def __init__(self, folder: Path) -> None:
        """folder: the run's folder. It must have no records yet, except the records that this machine writes as a node of the
        run."""
        self._folder = folder
        self._owners: dict[str, str] = {}  # for each file by its name: the node that writes the file

    def apply_change(self, node_name: str, change: RecordChange) -> None:
        """Repeat on the first node a change that happened on the node `node_name`. Raises ShardlabError if `node_name` may not
        write the file, or if the file on the first node ends before the byte at which the content begins."""
        if change.name == "":
            with files.as_workspace_error("write"):
                (self._folder / f"{PROGRESS_PREFIX}{node_name}").touch()
            return
        copy_path = self._folder / change.name
        if not (APPENDED_FILES.fullmatch(change.name) or WHOLE_FILES.fullmatch(change.name)):
            raise ShardlabError(f"{node_name}: sent the file {change.name[:100]!r}, which is not a record of a run.")
        self._must_own(node_name, copy_path, change.name)
        if change.content is None:
            _remove_copy(copy_path)
            return
        files.make_folder(copy_path.parent)
        if WHOLE_FILES.fullmatch(change.name):
            files.write_atomic(copy_path, change.content)
        else:
            _append_at(node_name, copy_path, change.content, change.first_byte)

    def _must_own(self, node: str, copy_path: Path, name: str) -> None:
        """Raises ShardlabError if another node writes this file: each file of records has one writer."""
        owner = self._owners.get(name, "the first node" if copy_path.exists() else node)
        if owner != node:
            raise ShardlabError(
                f"{node}: sent the file {name}, which {owner} writes. If both nodes have one host name, change one of them."
            )
        self._owners[name] = node


def _append_at(node: str, path: Path, content: bytes, first_byte: int) -> None:
    """Keep the first `first_byte` bytes of a file and write `content` behind them. Raises ShardlabError if the file is shorter
    than `first_byte` bytes. node: the sender, for the error."""
    with files.as_workspace_error("write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as copy_file:
            if first_byte > (file_size := os.fstat(descriptor).st_size):
                raise ShardlabError(f"{node}: sent byte {first_byte} of {path.name}, of which this node has {file_size} bytes.")
            copy_file.seek(first_byte)
            copy_file.write(content)
            copy_file.truncate()  # if the node replaced its file, the new file may be shorter than the copy here


def _remove_copy(copy_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        copy_path.unlink()
    if copy_path.parent.parent.name == "checkpoints":
        with contextlib.suppress(OSError):  # raised if the first node's own part of the checkpoint is still in the folder
            copy_path.parent.rmdir()
