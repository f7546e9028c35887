"""Runs rsync to copy files with given names to or from another machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from shardlab.cluster.address import Address
from shardlab.errors import ShardlabError
from shardlab.remote.ssh_command import ssh_command, wrap_for_any_shell

# Options for files from a machine that is not trusted: only regular files and folders are copied, and only this user may read
# them.
FROM_OTHERS = (
    "--no-links", "--no-devices", "--no-specials",
    "--perms", "--chmod=D700,F600",  # permissions on the other machine are ignored
    "--ignore-missing-args",  # a file that no longer exists is skipped, and the other files are copied
    "--partial-dir=.rsync-partial",  # an incomplete file is stored in a separate folder, and the next transfer resumes there
)  # fmt: skip
MOST_ERROR_BYTES = 1 << 16  # largest number of bytes of rsync's error messages that are read
POLL_S = 0.1  # seconds between two checks whether the process has ended
PROGRESS_OPTIONS = ("--info=progress2", "--no-human-readable")  # with them, rsync prints the number of bytes transferred so far
_ARRIVED_PATTERN = re.compile(rb"(?:^|\r)\s*([0-9]+)\s+[0-9]+%")
MOST_PROGRESS_BYTES = 1000  # number of bytes that are read at the end of the progress output: several lines
START_MARK = secrets.token_hex(8)  # printed before the output of the other rsync, because a .bashrc may print text, too
INCOMPLETE_COPY_CODES = (23, 24)  # exit codes of rsync that mean: rsync tried all files, but some could not be copied
BROKEN_STREAM, NOT_FOUND = 12, 127  # exit codes of rsync and of a shell
# exit codes of rsync if the connection to the other machine failed or broke
CONNECTION_ERRORS = (10, BROKEN_STREAM, 30, 35, 255)
# rsync starts this sh program in place of ssh. Its words are a host, which is not used, and the command of the other rsync. All
# that comes before the line with the mark is dropped. It ends with the exit code of ssh.
_LOGIN_SCRIPT = """\
shift
exec 3>&1
code=$({{ {{ {ssh} {start}"$*" 3>&- 4>&-; echo $? >&4; }} |
  while IFS= read -r line; do case $line in *{mark}) exec cat >&3;; esac; done; }} 4>&1)
exit "$code"
"""


class RsyncEnd(msgspec.Struct, frozen=True):
    """How rsync ended."""

    code: int | None
    """Its exit code; None if it was ended early (`must_stop`)."""
    error: str = ""
    """Its first error message, or empty."""

    @property
    def is_connection_lost(self) -> bool:
        """Whether the connection to the other machine failed or broke, or a signal ended ssh."""
        return self.code is not None and (self.code in CONNECTION_ERRORS or self.code > 128)


def rsync_must_be_installed(needed_for: str) -> None:
    """Raise ShardlabError if rsync is not installed on this machine. needed_for: the part of shardlab that needs rsync."""
    if shutil.which("rsync") is None:
        raise ShardlabError(f"{needed_for} needs rsync, which is not installed on {gethostname()}: apt install rsync.")


def remote_words(address: Address, path: str) -> tuple[str, list[str]]:
    """A path on another machine for a command of rsync, and the options with which rsync logs in to that machine.

    The startup files of the login shell there may print text, and the shell may be any.
    """
    start = wrap_for_any_shell('exec "$@"', START_MARK) + " sh "
    login_command = _LOGIN_SCRIPT.format(ssh=shlex.join(ssh_command(address)), start=shlex.quote(start), mark=START_MARK)
    # `cat` needs blocking I/O
    return f"host:{path}", ["--blocking-io", f"--rsh={shlex.join(['sh', '-c', login_command, 'sh'])}"]


def run_rsync(
    options: Sequence[str],
    file_names: Sequence[str],
    source: str,
    target: str,
    *,
    must_stop: Callable[[], bool] = lambda: False,
    lock_descriptors: Sequence[int] = (),
    on_progress: Callable[[int], None] | None = None,
) -> RsyncEnd:
    """Run rsync to copy the files and folders with the given names.

    options: further options of rsync. file_names: paths relative to `source`. source, target: folders as rsync expects them,
    such as `HOST:PATH`. must_stop: returns True if the transfer must end early; it is called several times a second.
    lock_descriptors: descriptors of locked files, which rsync inherits, so that the locks are held until rsync ends.
    on_progress: is called from time to time with the number of bytes that have been copied so far."""
    argv = ["rsync", "--from0", "--files-from=-", *(PROGRESS_OPTIONS if on_progress else ()), *options, source, target]
    with tempfile.TemporaryFile() as name_list, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as progress:
        # Every name, also the last name, ends with a NUL. Without the last NUL, rsync 3.5 rejects the list if the last name
        # lies across a multiple of 4096 bytes.
        name_list.write("".join(f"{file_name}\0" for file_name in file_names).encode())
        name_list.seek(0)
        rsync_process = subprocess.Popen(
            argv, stdin=name_list, stdout=progress, stderr=errors, pass_fds=lock_descriptors, env=os.environ | {"LC_ALL": "C"},
            process_group=0,
        )  # fmt: skip
        try:
            while (exit_code := wait_for_exit(rsync_process)) is None:
                if must_stop():
                    return RsyncEnd(None)
                if on_progress:
                    _report_progress(progress.fileno(), on_progress)
        finally:
            # The whole group, because rsync ends only the program _LOGIN_SCRIPT, and not the ssh and the `cat` that it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rsync_process.pid, signal.SIGTERM)
            rsync_process.wait()
        if on_progress:
            _report_progress(progress.fileno(), on_progress)
        errors.seek(0)
        error_text = errors.read(MOST_ERROR_BYTES).decode("utf-8", "replace")
    lines = error_text.rpartition(f"{START_MARK}\n")[2].strip().splitlines()
    if exit_code == BROKEN_STREAM and lines and re.search("not found|unknown command", lines[0], re.IGNORECASE):
        exit_code = NOT_FOUND  # rsync may end before it knows the exit code of the other shell, which found no rsync
    return RsyncEnd(exit_code, lines[0].removeprefix("rsync: ") if lines else f"exit code {exit_code}" if exit_code else "")


def _report_progress(descriptor: int, on_progress: Callable[[int], None]) -> None:
    """Call `on_progress` with the number of bytes that rsync printed last. descriptor: the descriptor of rsync's progress
    output."""
    output_size = os.fstat(descriptor).st_size
    if byte_counts := _ARRIVED_PATTERN.findall(
        os.pread(descriptor, MOST_PROGRESS_BYTES, max(output_size - MOST_PROGRESS_BYTES, 0))
    ):
        on_progress(int(byte_counts[-1]))


def wait_for_exit(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of the process, or None if it has not ended after LOOK_S seconds."""
    try:
        return process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def move_into_place(source: Path, target: Path) -> None:
    """Move a file that has arrived to its final path, with the permissions of a new file of this user. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(apply_umask(0o644))
    source.replace(target)


def apply_umask(mode: int) -> int:
    """The permissions that a new file or folder gets if a process with the current umask creates it with `mode`."""
    umask = os.umask(0o077)
    os.umask(umask)
    return mode & ~umask
