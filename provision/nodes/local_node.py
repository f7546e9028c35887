"""This machine as a node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Unpack

import psutil

from provision.interruption import IS_STOPPING
from provision.node import Node, RunOptions
from shardlab.remote.remote import CommandOutput, Unreachable, make_put_command, shorten_command

GRACE_S = 5.0  # torchrun ends its ranks within this time after a SIGTERM


_RUNNING_PROCESSES: dict[int, Any] = {}  # the running commands by PID, for all objects LocalNode together: they are one machine


class LocalNode(Node, eq=False):
    """The machine that this program runs on."""

    name: str = "localhost"
    host: str = "localhost"
    python: str = sys.executable
    venv_python: str = sys.executable

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> CommandOutput:
        """Run `argv` in a session of its own, as `Node.run` describes. At the time limit, its descendants are ended, too.

        Raises Unreachable after this process was interrupted.
        """
        argv = ["sudo", "-n", "--", *argv] if options.get("root") and os.geteuid() != 0 else argv
        # LC_ALL: parsers need untranslated text. PYTHONSAFEPATH: Python must not import a folder `jobs` of the current folder.
        command_variables = {**os.environ, "LC_ALL": "C", "PYTHONSAFEPATH": "1", **self.variables, **(options.get("env") or {})}
        try:
            command_process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=command_variables,
                start_new_session=True,
            )
        except OSError as error:
            return CommandOutput(127, "", f"{argv[0]}: {error.strerror}")
        _RUNNING_PROCESSES[command_process.pid] = command_process
        # Tested after the process was added to _RUNNING_PROCESSES, so that `end_commands` cannot miss the process
        if IS_STOPPING.is_set():
            _end_process(command_process, 0)
            _RUNNING_PROCESSES.pop(command_process.pid, None)
            raise Unreachable("this program was interrupted.")
        with command_process:
            try:
                stdout, stderr = command_process.communicate(options.get("stdin", b""), timeout=options["timeout_s"])
            except subprocess.TimeoutExpired:
                stdout, stderr = _end_process(command_process)
                return CommandOutput(None, _decode_text(stdout), _decode_text(stderr))
            except BaseException:
                _end_process(command_process)
                raise
            finally:
                _RUNNING_PROCESSES.pop(command_process.pid, None)
        return CommandOutput(command_process.returncode, _decode_text(stdout), _decode_text(stderr))

    @property
    def running(self) -> tuple[str, ...]:
        """The beginnings of the commands that run on this machine now."""
        return tuple(shorten_command(process.args) for process in list(_RUNNING_PROCESSES.values()))

    def end_commands(self, limit_s: float) -> None:
        """End the running commands, as `Node.end_commands` describes: by SIGTERM and, after half of `limit_s`, by SIGKILL.

        Between the signals, programs such as torchrun can end the processes that they started.
        """
        processes = list(_RUNNING_PROCESSES.values())
        descendants = [descendant for process in processes for descendant in _find_descendants(process)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        self._wait_until_idle(limit_s / 2)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _kill_processes(descendants)
        self._wait_until_idle(limit_s / 2)

    def _wait_until_idle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while _RUNNING_PROCESSES and time.monotonic() < deadline:
            time.sleep(0.02)

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file on this machine, as `Node.put` describes."""
        return self.run(make_put_command(content, path, mode=mode, owner=owner), timeout_s=60, stdin=content, root=bool(owner))


def _decode_text(output_bytes: bytes) -> str:
    return output_bytes.decode("utf-8", "replace")


def _find_descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end_process(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> tuple[bytes, bytes]:
    """End a process and all its descendants: SIGTERM, and SIGKILL after `grace_s` seconds. Returns (its stdout, its stderr).

    Descendants are ended one by one: torchrun starts every rank in a session of its own, outside its process group.
    """
    descendants = _find_descendants(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=grace_s)
    except subprocess.TimeoutExpired:
        return _kill_process(process, descendants)
    finally:
        _kill_processes(descendants)


def _kill_process(process: subprocess.Popen[bytes], descendants: list[psutil.Process]) -> tuple[bytes, bytes]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill_processes(descendants)
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:  # a process that is no longer a descendant still holds the pipe open
        return b"", b""


def _kill_processes(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
