"""Runs Python scripts of tests in forks of one process that has already imported torch.

Importing torch takes ten times as long as a typical script. A script runs as with `python -c`: it has its own arguments,
environment, standard output, standard error and exit code. Later scripts do not see changes that a
script makes to modules, because each script runs in its own fork.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support_e2e import HANG_S


class Scripts:
    """Starts the process that has already imported torch, and sends the scripts of tests to this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: str, *words: str, **more_environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, whatever its exit code is."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, start_new_session=True,
            )  # fmt: skip
            assert self._answer() == "ready", "the process that forks scripts could not import what they need"
        with tempfile.TemporaryDirectory(prefix="script-") as folder:
            stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
            environment = {**self._environment, **more_environment}
            request = {
                "script": script,
                "words": words,
                "environment": environment,
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = self._answer()
            if code is None:
                self.end()
                raise AssertionError(f"the script has not ended within {HANG_S} s\n{stderr.read_text()}")
            return subprocess.CompletedProcess([script, *words], code, stdout.read_text(), stderr.read_text())

    def _answer(self) -> Any:
        """The next answer of the process, decoded from JSON; None if no answer arrives within HANG_S seconds."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], HANG_S)
        return json.loads(self._process.stdout.readline() or "null") if ready else None

    def end(self) -> None:
        """Kill the process and every process that its scripts left."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def _serve() -> None:
    """Fork a process for each request, and answer with its exit code.

    A request is one line of JSON on standard input.
    """
    from trainers.forking import fork_server

    for name in fork_server.list_preloaded_modules():
        importlib.import_module(name)
    _tell("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            _become(request)
        _tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _tell(answer: str | int) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _become(request: dict[str, Any]) -> None:
    """Run the script in the forked process, and exit with the script's exit code."""
    code: Any = 1
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["-c", *request["words"]]
        exec(compile(request["script"], "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - no exception may return into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
