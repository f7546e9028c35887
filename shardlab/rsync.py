"""Runs rsync with a list of names, to or from another machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from shardlab.errors import ShardlabError

# For files of a machine that is not trusted: only regular files and folders, which nobody else may read or execute.
FROM_OTHERS = (
    "--no-links", "--no-devices", "--no-specials",
    "--perms", "--chmod=D700,F600",  # ours alone, whatever the modes on the other machine are
    "--ignore-missing-args",  # a file that is gone is missing afterwards, and the others arrive
    "--partial-dir=.rsync-partial",  # what arrived of a file is kept apart, and the next transfer goes on from there
)  # fmt: skip
MOST_TEXT = 2000  # bytes of what rsync says
LOOK_S = 0.1
PROGRESS = ("--info=progress2", "--no-human-readable")  # on its standard output: the bytes that were transferred so far
_ARRIVED = re.compile(rb"(?:^|\r)\s*([0-9]+)\s+[0-9]+%")
MOST_PROGRESS = 1000  # bytes: some lines
# rsync asks whether the shell is clean if text comes before its own protocol.
NOT_CLEAN = "is your shell clean"
NOT_CLEAN_WHY = (
    "a startup file of the shell on the other machine, such as ~/.bashrc, prints text; it must print nothing for a command "
    "over SSH (docs/ssh.md)"
)


class RsyncEnd(msgspec.Struct, frozen=True):
    """How rsync ended. code: its exit code, None if it was told to end; said: its first error message, or ''."""

    code: int | None
    said: str = ""


def must_be_installed(what: str) -> None:
    """Raises ShardlabError if this machine has no rsync. what: which part of shardlab needs rsync."""
    if shutil.which("rsync") is None:
        raise ShardlabError(f"{what} needs rsync, which is not installed on {gethostname()}: apt install rsync.")


def run(
    options: Sequence[str],
    names: Sequence[str],
    source: str,
    target: str,
    *,
    told: Callable[[], bool] = lambda: False,
    holds: Sequence[int] = (),
    report: Callable[[int], None] | None = None,
) -> RsyncEnd:
    """Copy the files and folders of these names from one place to the other.

    told: whether to end early. holds: descriptors of locks that rsync holds too, until it ends. report: is told from time to
    time how many bytes arrived so far.
    """
    argv = ["rsync", "--from0", "--files-from=-", *(PROGRESS if report else ()), *options, source, target]
    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as progress:
        # Each name ends with a NUL: rsync 3.5 refuses a last name without one if it lies across a multiple of 4096 bytes.
        listed.write("".join(f"{name}\0" for name in names).encode())
        listed.seek(0)
        process = subprocess.Popen(
            argv, stdin=listed, stdout=progress, stderr=errors, pass_fds=holds, env=os.environ | {"LC_ALL": "C"}
        )
        try:
            while (code := _code(process)) is None:
                if told():
                    return RsyncEnd(None)
                if report:
                    _report(progress.fileno(), report)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if report:
            _report(progress.fileno(), report)
        errors.seek(0)
        lines = errors.read(MOST_TEXT).decode("utf-8", "replace").strip().splitlines()
    if any(NOT_CLEAN in line for line in lines):
        return RsyncEnd(code, NOT_CLEAN_WHY)
    return RsyncEnd(code, lines[0].removeprefix("rsync: ") if lines else f"exit code {code}" if code else "")


def _report(progress: int, report: Callable[[int], None]) -> None:
    """Report the last number of bytes that rsync wrote. progress: the descriptor of its standard output."""
    end = os.fstat(progress).st_size
    if arrived := _ARRIVED.findall(os.pread(progress, MOST_PROGRESS, max(end - MOST_PROGRESS, 0))):
        report(int(arrived[-1]))


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, or None if the process has not ended after a moment."""
    try:
        return process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def put_in_place(source: Path, target: Path) -> None:
    """Move a file that arrived to its place, with the mode of other files of this user. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(0o644 & ~_umask())
    source.replace(target)


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
