"""fabric's Connection to a machine, whose commands the user's OpenSSH runs. No connection of paramiko is opened."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import fabric
from invoke import runners

START_S = 60.0  # seconds in which the startup files of the login shell must end, before the input of a command is given up


class CommandInput(io.BytesIO):
    """The input of a command, which is sent after the command has printed its mark: a startup file could read it
    otherwise."""

    def __init__(self, start_mark: str, input_bytes: bytes) -> None:
        super().__init__(input_bytes)
        self.start_mark = start_mark


class SshRunner(runners.Local):
    """Runs one command: starts `ssh` on this machine with the command as its last word."""

    read_chunk_size = 1 << 16

    def __init__(self, context: SshConnection, inline_env: bool) -> None:
        super().__init__(context)  # inline_env does not matter: the command itself sets its environment

    def start(self, command: str, shell: str, env: dict[str, str]) -> None:
        """Start ssh in a session of its own: otherwise Ctrl-C would end ssh, but not the command on the machine."""
        pipe_option = subprocess.PIPE
        argv = [*self.context.ssh_words, command]
        self.process = subprocess.Popen(argv, stdin=pipe_option, stdout=pipe_option, stderr=pipe_option, start_new_session=True)

    def stop(self) -> None:
        """Close the pipes of ssh after its end."""
        super().stop()
        process: subprocess.Popen[bytes] | None = getattr(self, "process", None)  # None: ssh did not start
        for stream in (process.stdout, process.stderr) if process is not None else ():
            if stream is not None:
                stream.close()

    def handle_stdin(self, input_: IO[Any], output: IO[Any], echo: bool = False) -> None:
        """Send the input of the command when its mark has arrived, and then the end of the input."""
        assert isinstance(input_, CommandInput)
        assert self.process.stdin is not None
        input_bytes = input_.getvalue()
        deadline = time.monotonic() + START_S
        while input_bytes and not self._has_mark(input_.start_mark) and not self.process_is_finished:
            if time.monotonic() > deadline:
                break
            time.sleep(self.input_sleep)
        try:
            with self.process.stdin as stdin:
                if self._has_mark(input_.start_mark):
                    stdin.write(input_bytes)
        except BrokenPipeError:
            return  # the command ended before it read its whole input; its exit code says why

    def _has_mark(self, mark: str) -> bool:
        return mark in "".join(self.stdout)


class SshConnection(fabric.Connection):  # type: ignore[misc]  # fabric has no types
    """A connection that `log_in` opens and `log_out` closes. `run` runs a command through it."""

    def __init__(self, host: str, ssh_words: Sequence[str], log_in: Callable[[], None], log_out: Callable[[], None]) -> None:
        """ssh_words: the `ssh` command without the last word. log_in raises an exception if the login fails."""
        config = fabric.Config(lazy=True, overrides={"runners": {"remote": SshRunner}})  # lazy: no file configures fabric
        super().__init__(host, gateway="", config=config)
        self._set(ssh_words=list(ssh_words), _log_in=log_in, _log_out=log_out, _is_open=False)

    @property
    def is_connected(self) -> bool:
        """Whether the login has succeeded."""
        is_open: bool = self._is_open
        return is_open

    def open(self) -> None:
        """Log in, unless this was done."""
        if not self._is_open:
            self._log_in()
            self._set(_is_open=True)

    def close(self) -> None:
        """Log out; the next command logs in again."""
        if self._is_open:
            self._set(_is_open=False)
            self._log_out()
