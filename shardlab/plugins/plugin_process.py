"""Runs a separate process that executes files of the user, and reads its answer. The commands themselves never execute them.

The code of the user can print text without end, start other processes, run for ever or end its process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.errors import InputError
from shardlab.files import files, json_file

MOST_OUTPUT_BYTES = 1 << 16  # the most bytes that are read from the end of a process's output
A = TypeVar("A")


def ask_process(words: Sequence[str], plugin_path: Path, answer_type: type[A], limit_s: int, python: str | None = None) -> A:
    """The answer of a process that executes files of the user, checked to have the type `answer_type`.

    words: the module of the process, and its arguments; the file for the answer, in JSON, is added as `--out FILE`. plugin:
    the file or folder that is executed, for messages. python: the interpreter; None: that of this process. Raises InputError if
    there is no answer within `limit_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer_path, output_path = Path(folder) / "answer.json", Path(folder) / "said"
        argv = [python or interpreter_path(), "-P", "-m", *words, "--out", str(answer_path)]
        exit_code = run_process(argv, folder, output_path, limit_s)
        if exit_code is None:
            raise InputError(f"{plugin_path}: its code did not end within {limit_s} s.")
        answer = json_file.read_json_if_valid(answer_path, answer_type)
        if answer is None:
            last_output = read_last_line(output_path)
            failure_text = f"{argv[0]} {f'says: {last_output}' if last_output else f'ended with code {exit_code}'}"
            raise InputError(f"{plugin_path}: its code gave no valid answer. {failure_text}")
    return answer


def interpreter_path() -> str:
    """The path of the Python interpreter that executes the code of users."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def make_environment() -> dict[str, str]:
    """The environment variables of a process that executes the code of users, which is to answer questions and not to train.
    They hide the GPUs and forbid downloads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run_process(
    argv: Sequence[str], folder: str | Path, output_path: Path, limit_s: float, errors_path: Path | None = None
) -> int | None:
    """Run a process; return its exit code, or None if it took longer than `limit_s` seconds and was killed.

    folder: the working directory of the process. output_path: the file for its output. errors_path: the file for its errors;
    None: as `output_path`. The output is not read from a pipe, because the code of the user may start another process that
    keeps the pipe open for ever."""
    with contextlib.ExitStack() as open_resources:
        output_file = open_resources.enter_context(output_path.open("wb"))
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output_file, cwd=folder, env=make_environment(), start_new_session=True,
            stderr=output_file if errors_path is None else open_resources.enter_context(errors_path.open("wb")),
        )  # fmt: skip
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
