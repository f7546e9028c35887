"""Transfer files from the cluster's workspace into a staging folder, by rsync.

What arrives is not trusted: the caller checks each file before it takes its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardlab import files, remote_workspace
from shardlab.errors import ShardlabError
from shardlab.remote import rsync_words
from shardlab.remote_workspace import RemoteWorkspace

OPTIONS = (
    "--from0", "--files-from=-",
    "--ignore-missing-args",  # a file that is gone is missing afterwards, and the others arrive
    "--ignore-times",  # the caller names only files whose content has to come
    "--partial-dir=.rsync-partial",  # what arrived of a file is kept apart, and the next transfer goes on from there
    "--no-links", "--no-devices", "--no-specials",
    "--perms", "--chmod=D700,F600",  # ours alone, whatever the modes on the cluster are
    "--compress", "--timeout=120",
)  # fmt: skip
INCOMPLETE = (23, 24)  # rsync went through all files, and some did not arrive
MOST_TEXT = 2000  # bytes of what rsync says


class Transfer(msgspec.Struct):
    """How a transfer ended. stopped: rsync ended before it had tried all files; said: the first error message of rsync."""

    stopped: bool = False
    said: str = ""


class Rsync:
    """rsync, from the workspace on the cluster."""

    def __init__(self, there: RemoteWorkspace, lock: int) -> None:
        """lock: the descriptor of a lock that rsync holds too, until it ends. Raises ShardlabError if there is no rsync."""
        if shutil.which("rsync") is None:
            raise ShardlabError("collect fetch needs rsync, which is not installed on this machine: apt install rsync.")
        self._lock = lock
        self._root, self._shell = f"{there.workspace}/", []
        if not _sees(there):
            host, shell = rsync_words(there.address)
            self._root, self._shell = f"{host}:{self._root}", [shell]

    def bring(self, source: str, target: Path, names: Sequence[str], *options: str) -> Transfer:
        """Transfer these files from the folder `source` of the workspace there to the same names below `target`."""
        if not names:
            return Transfer()
        argv = ["rsync", *OPTIONS, *self._shell, *options, f"{self._root}{source}/", f"{target}/"]
        with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
            # Each name ends with a NUL: rsync 3.5 refuses a last name without one if it lies across a multiple of 4096 bytes.
            listed.write("".join(f"{name}\0" for name in names).encode())
            listed.seek(0)
            code = subprocess.run(
                argv, stdin=listed, stdout=subprocess.DEVNULL, stderr=errors, check=False, pass_fds=(self._lock,),
                env=os.environ | {"LC_ALL": "C"},
            ).returncode  # fmt: skip
            errors.seek(0)
            lines = errors.read(MOST_TEXT).decode("utf-8", "replace").strip().splitlines()
        said = lines[0].removeprefix("rsync: ") if lines else f"exit code {code}" if code else ""
        return Transfer(code != 0 and code not in INCOMPLETE, said)


def _sees(there: RemoteWorkspace) -> bool:
    """Whether this machine has the cluster's workspace under the same path, as on shared storage."""
    try:
        return files.read(Path(there.workspace) / remote_workspace.MARK).decode() == there.mark
    except (OSError, UnicodeDecodeError):
        return False
