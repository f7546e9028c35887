"""Starts a command of shardlab on the cluster, and exchanges messages with it while it runs.

`RemoteWorkspace.ask` starts a command and reads one document at its end. A conversation is for a command that sends much data
and needs answers in between. The messages are lines of JSON. Raw bytes may follow a line that says how many there are.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Self, TypeVar

import msgspec

from shardlab.errors import ShardlabError
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.remote.remote_workspace import MOST_BYTES, POLL_S, RemoteWorkspace
from shardlab.remote.ssh_command import CONNECTION_FAILED, describe_lost_command

BLOCK_BYTES = 1 << 17  # bytes that are read from the connection at a time
SILENCE_S = 3600.0  # seconds without data after which the command is given up: it may hash many files before it answers
END_LIMIT_S = 10.0  # seconds in which the command must end after it has closed its output
ABORT_LIMIT_S = 2.0  # the same if the `with` block of the conversation raised an exception
MOST_ERRORS = 1 << 16  # largest number of bytes of error messages that are read

T = TypeVar("T")


class ConnectionLost(ShardlabError):
    """Raised if the login failed, or the connection broke in the middle of a conversation.

    reason: the reason, as a clause. advice: what helps, as the end of the sentence.
    """

    def __init__(self, host: str, reason: str, advice: str = "; run the same command again") -> None:
        super().__init__(f"{host}: {reason}{advice}.")
        self.reason = reason


class _ProcessOutput(io.RawIOBase):
    """The output of a process. `must_stop` is called several times a second while there is no output."""

    def __init__(self, descriptor: int, host: str, must_stop: Callable[[], bool], silence_s: float) -> None:
        self._descriptor, self._host, self._must_stop, self._silence_s = descriptor, host, must_stop, silence_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        silent_since = time.monotonic()
        while True:
            if self._must_stop():
                raise ConnectionLost(self._host, "this command was interrupted")
            with contextlib.suppress(BlockingIOError):  # there is no output at present
                return os.readv(self._descriptor, [buffer])
            if select.select([self._descriptor], [], [], POLL_S)[0]:
                continue
            if time.monotonic() - silent_since > self._silence_s:
                raise ConnectionLost(self._host, f"nothing arrived for {self._silence_s:g} s")


class RemoteConversation:
    """A command that runs on the cluster. The end of the `with` statement also ends the command."""

    def __init__(self, remote: RemoteWorkspace, module: str, command_name: str, silence_s: float = SILENCE_S) -> None:
        """Start a Python module on the cluster for the workspace there. Raises NoLogin.

        command_name: the name of the command in error messages, such as `collect fetch`. silence_s: after this many seconds
        in which nothing arrived, or nothing could be sent, the connection counts as lost.
        """
        self._silence_s = silence_s
        remote.log_in()
        # Returns True if the command must end early. It is called several times a second.
        self.must_stop: Callable[[], bool] = lambda: False
        self.remote, self._command_name, self._has_started = remote, command_name, False
        self._next_check_s = 0.0  # when `must_stop` is called again
        start_mark = secrets.token_hex(8)
        self._start_mark = f"{start_mark}\n".encode()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__. No pipe: nobody would read it meanwhile
        pipe = subprocess.PIPE
        ssh_words = remote.make_ssh_command(module, [], start_mark)
        # In a process group of its own: a signal for this process does not end ssh, which would look like a lost connection.
        self._process = subprocess.Popen(ssh_words, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._errors, process_group=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for pipe_end in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe_end.fileno(), False)
        with contextlib.suppress(OSError):  # the limit of this user for the size of pipes is reached
            fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, BLOCK_BYTES)
        self._input_pipe, self._output_pipe = self._process.stdin, self._process.stdout
        self._output = io.BufferedReader(
            _ProcessOutput(self._process.stdout.fileno(), remote.host, self._is_interrupted, silence_s), BLOCK_BYTES
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._input_pipe.close()
        self._output.close()
        self._output_pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the command ends by itself: it cannot read or write any more
            self._process.wait(END_LIMIT_S if error is None else ABORT_LIMIT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def send(self, message: object) -> None:
        """Send one line to the command. Raises ShardlabError if the command has ended."""
        self.send_bytes(msgspec.json.encode(message) + b"\n")

    def send_bytes(self, sent_bytes: bytes | memoryview) -> None:
        """Send bytes to the command. Raises ConnectionLost or ShardlabError as `receive` does."""
        unsent_bytes, last_sent_s = memoryview(sent_bytes), time.monotonic()
        while unsent_bytes:
            if self._is_interrupted():
                raise ConnectionLost(self.remote.host, "this command was interrupted")
            try:
                unsent_bytes, last_sent_s = unsent_bytes[os.write(self._input_pipe.fileno(), unsent_bytes) :], time.monotonic()
            except BlockingIOError:  # the connection is slower than this machine
                if time.monotonic() - last_sent_s > self._silence_s:
                    raise ConnectionLost(self.remote.host, f"nothing could be sent for {self._silence_s:g} s") from None
                select.select([], [self._input_pipe], [], POLL_S)
            except BrokenPipeError:
                raise self._make_end_error() from None

    def receive(self, target_type: type[T]) -> T:
        """Receive one line, decoded as the type `target_type`.

        Raises ConnectionLost if the connection broke, and ShardlabError if the command failed or sent something else.
        """
        while not self._has_started:
            # a startup file may have printed the beginning of this line
            self._has_started = self._read_line().endswith(self._start_mark)
        json_line = self._read_line()
        try:
            return get_decoder(target_type).decode(json_line)
        except DECODE_FAULTS as error:
            raise self.remote.make_mismatch_error(self._command_name, str(error)) from None

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a buffer with bytes from the command. Raises ConnectionLost or ShardlabError as `receive` does."""
        while buffer:
            read_count = self._output.readinto(buffer)
            if not read_count:
                raise self._make_end_error()
            buffer = buffer[read_count:]

    def _is_interrupted(self) -> bool:
        if (now_s := time.monotonic()) < self._next_check_s:  # not for each block: `must_stop` may read a file
            return False
        self._next_check_s = now_s + POLL_S / 2
        return self.must_stop()

    def _read_line(self) -> bytes:
        output_line = self._output.readline(MOST_BYTES)
        if output_line.endswith(b"\n"):
            return output_line
        if len(output_line) < MOST_BYTES:
            raise self._make_end_error()
        raise self.remote.make_mismatch_error(self._command_name, f"more than {MOST_BYTES >> 20} MiB in one line")

    def _make_end_error(self) -> ShardlabError:
        """The error for a command that ended before the end of the conversation."""
        self._input_pipe.close()  # else a command that waits for a message would not end
        try:
            exit_code = self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            exit_code = CONNECTION_FAILED
        self._errors.seek(0)
        error_bytes = self._errors.read(MOST_ERRORS)
        if not self._has_started and self._start_mark not in error_bytes:
            sentence = describe_lost_command(self.remote.host, exit_code, "", error_bytes.decode("utf-8", "replace"))
            return ConnectionLost(self.remote.host, sentence.removeprefix(f"{self.remote.host}: ").removesuffix("."), "")
        error_text = "\n".join((error_bytes.rpartition(self._start_mark)[2]).decode("utf-8", "replace").strip().splitlines())
        if self._has_started and (exit_code == CONNECTION_FAILED or exit_code < 0):
            return ConnectionLost(self.remote.host, "the connection broke in the middle of an answer")
        if "No module named" in error_text or (self._has_started and not error_text):
            return self.remote.make_mismatch_error(self._command_name, "it ended in the middle of an answer")
        return ShardlabError(
            f"{self.remote.host}: {error_text.removeprefix('error: ') or f'exit code {exit_code}, and no answer'}"
        )
