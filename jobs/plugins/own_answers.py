"""Finds out what the plug-in files of a workspace define (workloads and strategies).

A separate process executes the code of the files; `jobs` itself never does. The answers are cached by the digest of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from jobs.plugins import own_copies
from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.errors import InputError
from shardlab.files import files, json_file, plugin_source, source_digest
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import model_file
from shardlab.plugins import own_workload
from shardlab.plugins.own_strategy import StrategyDescription
from shardlab.plugins.own_workload import Description
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

ANSWER_S = 600  # the most seconds for an answer; importing torch from a cold network disk takes minutes
MOST_OUTPUT_BYTES = 1 << 16  # the most bytes that are read from the end of a process's output

D = TypeVar("D", Description, StrategyDescription)


def describe_plugin(workspace: Workspace, source: PluginSource, kind: type[D], seq_len: int | None = None) -> D:
    """What a plug-in file defines, from the cache or from a new process.

    kind: the type of the answer, which decides whether the file is asked for workloads or for strategies. seq_len: the sequence
    length, for a model that is described by its configuration. Raises InputError, which names the fault of the file.
    """
    key = "".join((source.digest, source_digest.digest_source(), source_digest.digest_installed_packages(), str(seq_len or "")))
    prefix = source.name if kind is Description else f"strategies.{source.name}"
    path = own_copies.find_plugin_copies_folder(workspace) / f"{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if (cached_answer := json_file.read_json_if_valid(path, kind)) is not None:
        return cached_answer
    answer = _ask_process(source, kind, seq_len)
    if answer.fault:
        raise InputError(answer.fault)
    workspace_trust.begin_workspace(workspace)
    files.make_folder(path.parent)
    for outdated in path.parent.glob(f"{prefix}-{'?' * 16}.json"):  # remove answers for earlier versions of the file
        outdated.unlink(missing_ok=True)
    files.write_json(path, answer, sync=False)
    return answer


def interpreter_path() -> str:
    """The path of the Python interpreter that executes the code of users."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def make_environment() -> dict[str, str]:
    """The environment variables of a process that executes the code of users to find out what the code defines. They hide the
    GPUs and forbid downloads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a new session, together with all processes in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ask_process(source: PluginSource, kind: type[D], seq_len: int | None) -> D:
    """Ask a separate process what the file defines. If the process fails, the answer contains the fault.

    That process executes the code of the file, which can also print text or end the process.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer_path, output_path, plugin_path = Path(folder) / "answer.json", Path(folder) / "said", source.file
        if plugin_path.suffix == model_file.SUFFIX:  # use the normalized text that runs get, not the text of the user's file
            plugin_source.write_plugin(Path(folder) / own_workload.FOLDER, source)
            plugin_path = Path(folder) / own_workload.FOLDER / plugin_path.name
        length_options: list[str] = [] if seq_len is None else ["--seq-len", str(seq_len)]
        argv = [
            interpreter_path(),
            "-P",
            "-m",
            "trainers",
            "describe",
            str(plugin_path),
            *length_options,
            "--out",
            str(answer_path),
        ]
        exit_code = _run_process(argv, folder, output_path)
        if exit_code is None:
            return kind(fault=f"{source.file}: its code did not end within {ANSWER_S} s.")
        description = json_file.read_json_if_valid(answer_path, kind)
        if description is None:
            last_output = read_last_line(output_path)
            why = f"{interpreter_path()} {f'says: {last_output}' if last_output else f'ended with code {exit_code}'}"
            return kind(fault=f"{source.file}: it cannot be found out what it defines. {why}")
    entries = description.workloads if isinstance(description, Description) else description.strategies
    if any(entry.code != source.digest for entry in entries):
        return kind(fault=f"{source.file}: changed while it was read; run the command again.")
    return description


def _run_process(argv: Sequence[str], folder: str, output_path: Path) -> int | None:
    """Run a process; return its exit code, or None if it took longer than ANSWER_S.

    folder: the working directory of the process. output_path: the file for its output. The output is not read from a pipe,
    because the code of the user may start another process that keeps the pipe open for ever."""
    with output_path.open("wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=make_environment(), start_new_session=True
        )
        try:
            return process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_process_group(process)


def read_last_line(path: Path) -> str:
    """The last line that a process wrote to a file; empty if the process wrote nothing."""
    with files.open_regular(path) as output_file:
        output_file.seek(max(0, path.stat().st_size - MOST_OUTPUT_BYTES))
        lines = output_file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
