"""The login node of a Slurm site. All commands on this node share one SSH connection."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from provision.interruption import STOPPING
from provision.node import RunOptions
from provision.nodes.local_node import LocalNode
from shardlab.cluster.address import Address
from shardlab.remote import shared_connection
from shardlab.remote.remote import (
    GRACE_S,
    SESSION,
    CommandOutput,
    Unreachable,
    put_command,
    shorten_command,
    ssh_command,
    wrap_for_any_shell,
)

CONNECTION_LOST = 255  # the exit code with which ssh reports its own failure, such as a broken connection
# Takes PATH from a login shell if sbatch is not found: a command over SSH runs in no login shell, and at many sites only login
# shells have Slurm's commands in PATH.
FIND_SLURM = """\
command -v sbatch > /dev/null 2>&1 || {
    path=$(bash -lc 'printf "\\n%s\\n" "$PATH"' 2> /dev/null < /dev/null | tail -n 1)
    export PATH="${path:-$PATH}"
}
"""


class LoginNode:
    """The login node of a Slurm site, where shardlab has the rights of the user. Commands that need root are refused."""

    def __init__(self, address: Address, python: str = "python3") -> None:
        self.name = address.host
        self.host, self.port, self.user, self.identity = address.host, address.port, address.user, address.identity
        self.address = address.host
        self.python = python
        self.wheelhouse: str | None = None
        self.may_sudo = False
        self.venv_python = "python3"
        self.variables: dict[str, str] = {}  # environment variables of each command on the login node
        self._command = ssh_command(address)
        self._running: dict[str, str] = {}  # mark of a running command, made by `run` -> first words of the command
        self._is_open = False

    @property
    def running(self) -> tuple[str, ...]:
        """The beginnings of the commands that run on the login node now."""
        return tuple(self._running.values())

    def end(self, limit_s: float) -> None:
        """End the commands of this program on the login node, as `Node.end` describes.

        The commands get SIGTERM on the login node, because a command without a terminal does not end when its connection ends.
        """
        deadline = time.monotonic() + limit_s
        # The brackets in the pattern prevent that pkill matches its own command line.
        command = [*self._command, f"pkill -TERM -f '[{SESSION[0]}]{SESSION[1:]}'"]
        null = subprocess.DEVNULL
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=limit_s, check=False, start_new_session=True)
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> CommandOutput:
        """Run a command on the login node, as `Node.run` describes. Raises Unreachable."""
        if options.get("root"):
            return CommandOutput(1, "", "this needs root, which users of a Slurm site do not have")
        if STOPPING.is_set():
            raise Unreachable(f"{self.name}: this program was interrupted.")
        self._log_in()
        mark = secrets.token_hex(8)  # printed before the command's output: text before the mark comes from a shell profile
        timeout_s = options["timeout_s"]
        script = _make_script(argv, self.variables | dict(options.get("env") or {}), timeout_s, mark)
        with tempfile.TemporaryFile() as inputs, tempfile.TemporaryFile() as outputs, tempfile.TemporaryFile() as errors:
            inputs.write(options.get("stdin", b""))
            inputs.seek(0)
            process = subprocess.Popen(
                [*self._command, wrap_for_any_shell(script)],
                stdin=inputs,
                stdout=outputs,
                stderr=errors,
                start_new_session=True,  # otherwise Ctrl-C would end ssh here, but not the command on the login node
            )
            self._running[mark] = shorten_command(argv)
            begin = time.monotonic()
            try:
                code: int | None = process.wait(timeout_s + 3 * GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            finally:
                self._running.pop(mark, None)
            texts = []
            for stream in (outputs, errors):
                stream.seek(0)
                texts.append(stream.read().decode("utf-8", "replace"))
        if code == CONNECTION_LOST:  # ssh exits with this code also if the connection broke during a command
            self._is_open = False
            lines = texts[1].replace(f"{mark}\n", "").strip().splitlines()
            raise Unreachable(f"{self.name}: {lines[-1].strip() if lines else 'the connection broke'}.")
        stdout, stderr = (text.partition(mark + "\n")[2] for text in texts)
        # `timeout` exits with 124 or 137 at the time limit. A command that the site killed also exits with 137, but earlier.
        timed_out = code in (124, 137) and time.monotonic() - begin >= timeout_s
        return CommandOutput(None if timed_out else code, stdout, stderr)

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file on the login node as the user, completely or not at all. owner: is ignored. Raises Unreachable."""
        return self.run(put_command(content, path, mode=mode, owner=""), timeout_s=_sending_limit_s(content), stdin=content)

    def _log_in(self) -> None:
        if self._is_open:
            return
        try:
            shared_connection.open_connection(self._command, self.name)
        except shared_connection.NoLogin as error:
            raise Unreachable(str(error)) from None
        self._is_open = True


def login_address(host: str, user: str | None = None, port: int | None = None, identity: Path | None = None) -> Address:
    """The SSH address of a login node, with one connection that all commands share."""
    return Address(host, port, user, identity, shared=True)


class LocalLoginNode(LocalNode, eq=False):
    """The login node of a Slurm site, if this program runs on this node."""

    may_sudo: bool = False

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file as this user, completely or not at all. owner: is ignored."""
        return self.run(put_command(content, path, mode=mode, owner=""), timeout_s=600, stdin=content)


def _make_script(argv: Sequence[str], env: Mapping[str, str], timeout_s: float, mark: str) -> str:
    """The shell script that prints `mark` on both outputs, and then runs a command with a time limit."""
    variables = ["LC_ALL=C", "PYTHONSAFEPATH=1", SESSION, *(f"{name}={value}" for name, value in env.items())]
    words = ["timeout", f"--kill-after={GRACE_S:g}", f"{timeout_s:g}", "env", *variables, *argv]
    return f"{FIND_SLURM}echo {mark}; echo {mark} >&2; {shlex.join(words)}"


def _sending_limit_s(content: bytes) -> float:
    """The time limit for sending a file, in seconds: 10 minutes, or the time at 4 Mbit/s if that is longer.

    At this rate, a gigabyte of torch is sent in time over the internet connection of a home.
    """
    return max(600.0, len(content) / 5e5)
