"""Transfer files from the cluster's workspace into a staging folder, by rsync.

What arrives is not trusted: the caller checks each file before it takes its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from collect.fetching import manifest
from collect.fetching.manifest import ManifestFile
from shardlab import files, remote_workspace
from shardlab.errors import ShardlabError
from shardlab.files import NotRegular
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
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(0o644 & ~_umask())
    os.utime(source, ns=(file.mtime_ns, file.mtime_ns))
    source.replace(target)


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def _sees(there: RemoteWorkspace) -> bool:
    """Whether this machine has the cluster's workspace under the same path, as on shared storage."""
    try:
        return files.read(Path(there.workspace) / remote_workspace.MARK).decode() == there.mark
    except (OSError, UnicodeDecodeError):
        return False
