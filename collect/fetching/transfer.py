"""Transfers files from the workspace on the cluster into a staging folder, with rsync.

Files that arrive are not trusted: the caller checks each file before it is moved into a run folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from collect.fetching import manifest
from collect.fetching.manifest import ManifestFile
from shardlab import files, remote_workspace, rsync
from shardlab.files import NotRegular
from shardlab.remote import rsync_words
from shardlab.remote_workspace import RemoteWorkspace

OPTIONS = (
    *rsync.FROM_OTHERS,
    "--ignore-times",  # do not skip a file because its size and time are equal: the caller names only files that it needs
    "--compress", "--timeout=120",
)  # fmt: skip
INCOMPLETE = (23, 24)  # exit codes of rsync: all files were tried, but some did not arrive


class Transfer(msgspec.Struct):
    """How a transfer ended."""

    stopped: bool = False  # whether rsync ended before it had tried all files
    said: str = ""  # the first error message of rsync


class Rsync:
    """Transfers files from the workspace on the cluster with rsync."""

    def __init__(self, there: RemoteWorkspace, lock: int, told: Callable[[], bool]) -> None:
        """lock: the file descriptor of a lock, which rsync also holds until it ends. told: returns whether to stop early.

        Raises ShardlabError if rsync is not installed.
        """
        rsync.must_be_installed("collect fetch")
        self._lock, self._told = lock, told
        self._root, self._shell = f"{there.workspace}/", []
        if not _sees(there):
            host, shell = rsync_words(there.address)
            self._root, self._shell = f"{host}:{self._root}", [shell]

    def bring(
        self, source: str, target: Path, names: Sequence[str], *options: str, report: Callable[[int], None] | None = None
    ) -> Transfer:
        """Transfer the files `names` from the folder `source` of the workspace on the cluster into the folder `target`.

        options: additional options of rsync. report: is called from time to time with the number of bytes that have arrived.
        """
        if not names:
            return Transfer()
        words = [*OPTIONS, *self._shell, *options]
        end = rsync.run(
            words, names, f"{self._root}{source}/", f"{target}/", told=self._told, holds=(self._lock,), report=report
        )
        return Transfer(end.code != 0 and end.code not in INCOMPLETE, end.said)


def has_arrived(folder: Path, name: str, file: ManifestFile) -> bool:
    """Whether a file arrived with the content that a manifest gives for it. folder: the staging folder of the run.

    If the file grew during the transfer, it is cut to the size in the manifest.
    """
    with contextlib.suppress(FileNotFoundError, NotRegular):
        status = manifest.regular(folder, name)
        if status is not None and status.st_size >= file.bytes and manifest.digest(folder / name, file.bytes) == file.sha256:
            if status.st_size > file.bytes:
                os.truncate(folder / name, file.bytes)
            return True
    return False


def put_in_place(source: Path, target: Path, file: ManifestFile) -> None:
    """Move a file that arrived to its final path, and set the time that the manifest gives for it. Raises OSError."""
    os.utime(source, ns=(file.mtime_ns, file.mtime_ns))
    rsync.put_in_place(source, target)


def _sees(there: RemoteWorkspace) -> bool:
    """Whether this machine sees the workspace of the cluster under the same path, e.g. on shared storage."""
    try:
        return files.read(Path(there.workspace) / remote_workspace.MARK).decode() == there.mark
    except (OSError, UnicodeDecodeError):
        return False
