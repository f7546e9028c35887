"""Transfer files from the cluster's workspace into a staging folder, by rsync.

What arrives is not trusted: the caller checks each file before it takes its place.
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
    "--ignore-times",  # the caller names only files whose content has to come
    "--compress", "--timeout=120",
)  # fmt: skip
INCOMPLETE = (23, 24)  # rsync went through all files, and some did not arrive


class Transfer(msgspec.Struct):
    """How a transfer ended. stopped: rsync ended before it had tried all files; said: the first error message of rsync."""

    stopped: bool = False
    said: str = ""


class Rsync:
    """rsync, from the workspace on the cluster."""

    def __init__(self, there: RemoteWorkspace, lock: int, told: Callable[[], bool]) -> None:
        """lock: the descriptor of a lock that rsync holds too, until it ends. told: whether to end early.

        Raises ShardlabError if there is no rsync.
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
        """Transfer these files from the folder `source` of the workspace there to the same names below `target`.

        report: is told from time to time how many bytes arrived so far.
        """
        if not names:
            return Transfer()
        words = [*OPTIONS, *self._shell, *options]
        end = rsync.run(
            words, names, f"{self._root}{source}/", f"{target}/", told=self._told, holds=(self._lock,), report=report
        )
        return Transfer(end.code != 0 and end.code not in INCOMPLETE, end.said)


def has_arrived(folder: Path, name: str, file: ManifestFile) -> bool:
    """Whether a file arrived as a manifest has it. folder: of the run. A file that grew meanwhile is cut to the size it had."""
    with contextlib.suppress(FileNotFoundError, NotRegular):
        status = manifest.regular(folder, name)
        if status is not None and status.st_size >= file.bytes and manifest.digest(folder / name, file.bytes) == file.sha256:
            if status.st_size > file.bytes:
                os.truncate(folder / name, file.bytes)
            return True
    return False


def put_in_place(source: Path, target: Path, file: ManifestFile) -> None:
    """Move a file that arrived to its place, with the time that its manifest has. Raises OSError."""
    os.utime(source, ns=(file.mtime_ns, file.mtime_ns))
    rsync.put_in_place(source, target)


def _sees(there: RemoteWorkspace) -> bool:
    """Whether this machine has the cluster's workspace under the same path, as on shared storage."""
    try:
        return files.read(Path(there.workspace) / remote_workspace.MARK).decode() == there.mark
    except (OSError, UnicodeDecodeError):
        return False
