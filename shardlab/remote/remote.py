"""Runs commands on another machine. The user's OpenSSH makes the connection; fabric's Connection carries the commands.

A failed login or a broken connection raises `Unreachable` at once; nothing is tried again here. The time limits are in
ssh_command.py (connecting, silence) and shared_connection.py (logging in).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from shardlab.cluster.address import Address
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.remote import shared_connection
from shardlab.remote.ssh_command import describe_lost_command, make_ssh_command, wrap_for_any_shell

if TYPE_CHECKING:  # importing fabric takes long, and most commands reach no other machine
    from shardlab.remote.fabric_connection import SshConnection

GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL for a remote command; this process waits 3 * GRACE_S longer for the answer
MOST_SESSIONS = 8  # commands that run at the same time on one connection; OpenSSH's server allows 10 (MaxSessions)
# An environment variable of every remote command that this process starts. `Remote.end_commands` finds the commands by
# this variable.
SESSION_VARIABLE = f"SHARDLAB_SESSION={secrets.token_hex(8)}"

# Writes standard input to a temporary file beside $1, checks its SHA-256 ($2) and renames it to $1, so that a reader sees the
# whole old file or the whole new file. $3: suffix of the temporary file. $4: owner or empty. $5: mode.
PUT_SCRIPT = """\
set -eu
if test -z "$4"; then mkdir -p -- "$(dirname -- "$1")"; fi
umask 077
new=$1.$3
trap 'rm -f -- "$new"' EXIT; trap 'exit 1' HUP INT TERM
set -C
: > "$new"
set +C
cat > "$new"
test "$(sha256sum < "$new" | cut -d ' ' -f 1)" = "$2"
if test -n "$4"; then chown -- "$4" "$new"; fi
chmod -- "$5" "$new"
sync -- "$new"
mv -fT -- "$new" "$1"
"""


class CommandOutput(msgspec.Struct, frozen=True):
    """The output of a command."""

    code: int | None
    """Its exit code; None after the time limit; -N if signal N ended it on this machine."""
    stdout: str
    stderr: str


class Unreachable(ShardlabError):
    """Raised if a login failed or a connection broke."""

    node: str | None = None
    """The name of the machine in the cluster file, if it is known."""

    @property
    def reasons_by_node(self) -> dict[str, str]:
        """The name of the node and the message; empty if the name of the node is not known."""
        return {self.node: str(self)} if self.node is not None else {}


class Remote:
    """A machine that is reached over SSH. The first command logs in; later commands of all threads use the same connection."""

    def __init__(self, address: Address, *, may_sudo: bool = True, prepare_script: str = "") -> None:
        """may_sudo: whether the method `end_commands` may use sudo, without which it cannot end commands of root.
        prepare_script: lines of sh that run before each command."""
        self.address = address
        self._may_sudo, self._prepare_script = may_sudo, prepare_script
        self._lock = threading.Lock()
        self._session_slots = threading.BoundedSemaphore(MOST_SESSIONS)
        self._connection: SshConnection | None = None
        self._used_at_s = 0.0  # when the connection was used last
        self._command_by_mark: dict[str, str] = {}  # the beginning of each running command, by the mark of the command
        self._is_ended = False

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        root: bool = False,
    ) -> CommandOutput:
        """Run the command `argv` on the machine. Its words are passed on unchanged: no shell interprets them.

        timeout_s: seconds after which the command is ended on the machine. env: further environment variables. stdin: the
        standard input of the command. root: whether to run the command with sudo. All users of the machine can read argv and
        env, so a secret must be passed by `stdin`. Raises Unreachable.
        """
        env_words = [
            "env",
            "LC_ALL=C",
            "PYTHONSAFEPATH=1",
            SESSION_VARIABLE,
            *(f"{name}={value}" for name, value in (env or {}).items()),
        ]
        # `timeout` on the machine ends the command even if this process has ended. sudo comes before `timeout`: otherwise
        # `timeout` could not end a process of root.
        sudo_words = ["sudo", "-n", "--"] if root else []
        command_text = shlex.join([*sudo_words, "timeout", f"--kill-after={GRACE_S:g}", f"{timeout_s:g}", *env_words, *argv])
        output_mark = secrets.token_hex(8)
        # The line with the exit code proves that the command ended, and not only the connection.
        command_script = f"({self._prepare_script}{command_text}); echo {output_mark} $? >&2"
        start_s = time.monotonic()
        try:
            self._command_by_mark[output_mark] = shorten_command(argv)
            with self._session_slots:
                script_output = self._run_script(command_script, output_mark, stdin, timeout_s + 3 * GRACE_S)
        finally:
            self._command_by_mark.pop(output_mark, None)
        stdout, stderr = (text.partition(f"{output_mark}\n")[2] for text in (script_output.stdout, script_output.stderr))
        error_text, has_ended, exit_text = stderr.rpartition(f"{output_mark} ")
        exit_code = int(exit_text) if has_ended else None
        # `timeout` exits with 124 or 137 at the time limit. A command that was killed also exits with 137, but earlier.
        timed_out = exit_code in (124, 137) and time.monotonic() - start_s >= timeout_s
        return CommandOutput(None if timed_out else exit_code, stdout, error_text if has_ended else stderr)

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write the file `path` on the machine, completely or not at all. The content is sent as standard input.

        mode: the permissions of the file. owner: user and group as for chown, set by root; empty: the user who logs in writes
        the file without root. Raises Unreachable.
        """
        put_words = make_put_command(content, path, mode=mode, owner=owner)
        return self.run(put_words, timeout_s=compute_sending_limit_s(content), stdin=content, root=bool(owner))

    @property
    def running(self) -> tuple[str, ...]:
        """The beginning of each command that `run` has started and whose end this process has not seen yet."""
        return tuple(self._command_by_mark.values())

    def end_commands(self, limit_s: float) -> None:
        """Send SIGTERM to all commands that `run` started on the machine, and wait at most `limit_s` seconds until they end.

        From now on, `run` starts no command. A command that ignores SIGTERM is killed GRACE_S seconds later.
        """
        self._is_ended = True
        deadline = time.monotonic() + limit_s
        connection = self._connection  # not locked: another thread holds the lock during a login
        if connection is not None and self._command_by_mark:
            # The brackets prevent that pkill matches its own command line.
            kill = f"pkill -TERM -f '[{SESSION_VARIABLE[0]}]{SESSION_VARIABLE[1:]}'"
            argv = [*connection.ssh_words, wrap_for_any_shell(f"sudo -n {kill} || {kill}" if self._may_sudo else kill)]
            null = subprocess.DEVNULL
            with contextlib.suppress(subprocess.TimeoutExpired):  # the commands stay in `running`
                subprocess.run(argv, stdin=null, stdout=null, stderr=null, timeout=limit_s, check=False, start_new_session=True)
        while self._command_by_mark and time.monotonic() < deadline:
            time.sleep(0.02)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Log out, unless other processes share the connection; the next command logs in again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _run_script(self, script: str, mark: str, input_bytes: bytes, limit_s: float) -> CommandOutput:
        """Run a script of sh on the machine. The exit code in the result is None after `limit_s` seconds.

        mark: as for `wrap_for_any_shell`; the script prints it once more on standard error, with the exit code. Raises
        Unreachable if the script did not begin, or if its end did not arrive.
        """
        from invoke.exceptions import CommandTimedOut

        from shardlab.remote.fabric_connection import CommandInput

        connection = None if self._is_ended else self._open_connection()
        # Checked after the command is in _command_by_mark, so that `end_commands` sees each command.
        if connection is None or self._is_ended:
            self.close()
            raise Unreachable(f"{self.address.host}: this program was interrupted.")
        try:
            ssh_result = connection.run(
                wrap_for_any_shell(script, mark), in_stream=CommandInput(mark, input_bytes), hide=True, warn=True, echo=False,
                encoding="utf-8", timeout=limit_s,
            )  # fmt: skip
        except CommandTimedOut as error:
            return CommandOutput(None, error.result.stdout, error.result.stderr)
        self._used_at_s = time.monotonic()
        if f"{mark} " in ssh_result.stderr:
            return CommandOutput(ssh_result.exited, ssh_result.stdout, ssh_result.stderr)
        self.close()
        if f"{mark}\n" not in ssh_result.stdout:
            raise Unreachable(describe_lost_command(self.address.host, ssh_result.exited, ssh_result.stdout, ssh_result.stderr))
        last_error_line = next(reversed(ssh_result.stderr.replace(mark, "").strip().splitlines()), "ssh gave no reason")
        raise Unreachable(f"{self.address.host}: the connection broke: {last_error_line.strip().rstrip('.')}.")

    def _open_connection(self) -> SshConnection:
        """The connection, after a login if it is not open. Raises Unreachable."""
        from shardlab.remote.fabric_connection import SshConnection

        with self._lock:
            connection = self._connection
            if connection is None:
                words = make_ssh_command(self.address, uses_own_connection=not self.address.shared)
                connection = SshConnection(self.address.host, words, lambda: self._log_in(words), lambda: self._log_out(words))
            elif len(self._command_by_mark) <= 1 and time.monotonic() - self._used_at_s > shared_connection.KEEP_OWN_OPEN_S / 2:
                connection.close()  # OpenSSH may have closed it
            connection.open()
            self._connection, self._used_at_s = connection, time.monotonic()
            return connection

    def _log_in(self, ssh_words: Sequence[str]) -> None:
        if self.address.host_keys == "accept-new" and self.address.known_hosts is not None:
            files.make_folder(self.address.known_hosts.parent)
        try:
            shared_connection.open_connection(ssh_words, self.address.host, may_ask=self.address.shared)
        except shared_connection.NoLogin as error:
            raise Unreachable(str(error)) from None
        except FileNotFoundError:
            raise Unreachable(f"{self.address.host}: this machine has no command ssh: apt install openssh-client.") from None
        atexit.register(self.close)

    def _log_out(self, ssh_words: Sequence[str]) -> None:
        atexit.unregister(self.close)
        if not self.address.shared:
            shared_connection.close_connection(ssh_words)


def make_put_command(content: bytes, path: str, *, mode: int, owner: str) -> list[str]:
    """The words of a command that writes its standard input to `path`. It fails if the standard input is not `content`."""
    return ["sh", "-c", PUT_SCRIPT, "put", path, hashlib.sha256(content).hexdigest(), secrets.token_hex(4), owner, f"{mode:o}"]


def shorten_command(argv: Sequence[str]) -> str:
    """The first 60 characters of a command, on one line, for messages."""
    return " ".join(shlex.join(argv).split())[:60]


def compute_sending_limit_s(file_bytes: bytes) -> float:
    """The time limit for sending a file, in seconds: 10 minutes, or the time at 4 Mbit/s if that is longer.

    At this rate, a gigabyte of torch is sent in time over the internet connection of a home.
    """
    return max(600.0, len(file_bytes) / 5e5)
