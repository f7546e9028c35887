"""Runs separate processes that execute files of the user, and reads their answers. The commands never execute them.

The code of the user can print text without end, start other processes, run for ever or end its process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.errors import InputError
from shardlab.files import files, json_file
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import OwnWorkload, RefusalAnswer, RefusalQuestion

MOST_OUTPUT_BYTES = 1 << 16  # the most bytes that are read from the end of a process's output, and of an answer in a line
FIRST_ANSWER_S, NEXT_ANSWER_S = 300.0, 30.0  # the most seconds for the first answer, with imports, and for each later one
A = TypeVar("A")


def ask_process(words: Sequence[str], plugin_path: Path, answer_type: type[A], limit_s: int, python: str | None = None) -> A:
    """The answer of a process that executes files of the user, checked to have the type `answer_type`.

    words: the module of the process, and its arguments; the file for the answer, in JSON, is added as `--out FILE`. plugin:
    the file or folder that is executed, for messages. python: the interpreter; None: that of this process. Raises InputError if
    there is no answer within `limit_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as answer_folder:
        answer_path, output_path = Path(answer_folder) / "answer.json", Path(answer_folder) / "said"
        argv = [python or find_interpreter(), "-P", "-m", *words, "--out", str(answer_path)]
        exit_code = run_process(argv, answer_folder, output_path, limit_s)
        if exit_code is None:
            raise InputError(f"{plugin_path}: its code did not end within {limit_s} s.")
        answer = json_file.read_json_if_valid(answer_path, answer_type)
        if answer is None:
            last_output = read_last_line(output_path)
            failure_text = f"{argv[0]} {f'says: {last_output}' if last_output else f'ended with code {exit_code}'}"
            raise InputError(f"{plugin_path}: its code gave no valid answer. {failure_text}")
    return answer


def find_interpreter() -> str:
    """The path of the Python interpreter that executes the code of users."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def _start_process(
    argv: Sequence[str], folder: str | Path, stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that executes the code of users, in a session of its own. It answers questions and does not train, so it
    sees no GPU and may not download."""
    process_variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=process_variables, start_new_session=True
    )


def run_process(
    argv: Sequence[str], folder: str | Path, output_path: Path, limit_s: float, errors_path: Path | None = None
) -> int | None:
    """Run a process; return its exit code, or None if it took longer than `limit_s` seconds and was killed.

    folder: the working directory of the process. output_path: the file for its output. errors_path: the file for its errors;
    None: as `output_path`. The output is not read from a pipe, because the code of the user may start another process that
    keeps the pipe open for ever."""
    with contextlib.ExitStack() as open_resources:
        output_file = open_resources.enter_context(output_path.open("wb"))
        errors_file = output_file if errors_path is None else open_resources.enter_context(errors_path.open("wb"))
        process = _start_process(argv, folder, subprocess.DEVNULL, output_file, errors_file)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_process_group(process)


def kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a new session, together with all processes in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_last_line(path: Path) -> str:
    """The last line that a process wrote to a file; empty if it wrote nothing, or if it removed or replaced the file."""
    try:
        with files.open_regular(path) as output_file:
            output_file.seek(max(0, os.fstat(output_file.fileno()).st_size - MOST_OUTPUT_BYTES))
            output_lines = output_file.read(MOST_OUTPUT_BYTES).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return output_lines[-1] if output_lines else ""


class RefusingProcess:
    """Asks a separate process which cells the strategies of a file refuse. The first question starts the process."""

    def __init__(self, plugin_path: Path) -> None:
        self.plugin_path = plugin_path
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask_refusal(self, cell: Cell, workload: OwnWorkload | None) -> str | None:
        """Why the strategy of a cell refuses the cell, as a sentence; None if it accepts the cell.

        workload: the cell's workload if the workspace defines it, else None. Raises InputError if the code fails.
        """
        with self._lock:
            try:
                answer = self._ask_process(RefusalQuestion(cell.strategy, cell, workload))
            except BaseException:
                self.close()
                raise
        if answer.fault:
            raise InputError(answer.fault)
        return answer.why

    def close(self) -> None:
        """End the process that answers questions. A later question starts another process."""
        if self._process is not None:
            kill_process_group(self._process)
            for process_pipe in (self._process.stdin, self._process.stdout):
                assert process_pipe is not None
                process_pipe.close()
            self._process = None

    def _ask_process(self, question: RefusalQuestion) -> RefusalAnswer:
        limit_s = NEXT_ANSWER_S
        if self._process is None:
            limit_s = FIRST_ANSWER_S
            argv = [find_interpreter(), "-P", "-m", "trainers", "refuse", str(self.plugin_path)]
            self._process = _start_process(argv, "/", subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL)
        question_pipe, answer_pipe = self._process.stdin, self._process.stdout
        assert question_pipe is not None
        assert answer_pipe is not None
        try:
            question_pipe.write(msgspec.json.encode(question) + b"\n")
            question_pipe.flush()
        except BrokenPipeError:
            raise InputError(f"{self.plugin_path}: its code ended the process that asks it which cells it refuses.") from None
        readable_pipes, _, _ = select.select([answer_pipe], [], [], limit_s)
        if not readable_pipes:
            raise InputError(f"{self.plugin_path}: refuse of {question.strategy} did not answer within {limit_s:.0f} s.")
        answer_line = answer_pipe.readline(MOST_OUTPUT_BYTES)
        try:
            return get_decoder(RefusalAnswer).decode(answer_line)
        except DECODE_FAULTS:
            raise InputError(f"{self.plugin_path}: its code ended the process that asks it which cells it refuses.") from None
