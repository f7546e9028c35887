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
from shardlab.cluster.login_node import PYTHON
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
MOST_SAID = 1 << 16  # the most bytes that are read from the end of a process's output

D = TypeVar("D", Description, StrategyDescription)


def described(workspace: Workspace, source: PluginSource, kind: type[D], seq_len: int | None = None) -> D:
    """What a plug-in file defines, from the cache or from a new process.

    kind: the type of the answer, which decides whether the file is asked for workloads or for strategies. seq_len: the sequence
    length, for a model that is described by its configuration. Raises InputError, which names the fault of the file.
    """
    key = "".join((source.digest, source_digest.source(), source_digest.packages(), str(seq_len or "")))
    head = source.name if kind is Description else f"strategies.{source.name}"
    kept = own_copies.store(workspace) / f"{head}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if (known := json_file.read_if_valid(kept, kind)) is not None:
        return known
    found = _asked(source, kind, seq_len)
    if found.fault:
        raise InputError(found.fault)
    workspace_trust.begin(workspace)
    files.make_folder(kept.parent)
    for earlier in kept.parent.glob(f"{head}-{'?' * 16}.json"):  # remove answers for earlier versions of the file
        earlier.unlink(missing_ok=True)
    files.write_json(kept, found, sync=False)
    return found


def python() -> str:
    """The path of the Python interpreter that executes the code of users."""
    return os.environ.get(PYTHON, sys.executable)


def environment() -> dict[str, str]:
    """The environment variables of a process that executes the code of users to find out what the code defines. They hide the
    GPUs and forbid downloads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a new session, together with all processes in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _asked(source: PluginSource, kind: type[D], seq_len: int | None) -> D:
    """Ask a separate process what the file defines. If the process fails, the answer contains the fault.

    That process executes the code of the file, which can also print text or end the process.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer, said, file = Path(folder) / "answer.json", Path(folder) / "said", source.file
        if file.suffix == model_file.SUFFIX:  # use the normalized text that runs get, not the text of the user's file
            plugin_source.write(Path(folder) / own_workload.FOLDER, source)
            file = Path(folder) / own_workload.FOLDER / file.name
        length: list[str] = [] if seq_len is None else ["--seq-len", str(seq_len)]
        code = _run([python(), "-P", "-m", "trainers", "describe", str(file), *length, "--out", str(answer)], folder, said)
        if code is None:
            return kind(fault=f"{source.file}: its code did not end within {ANSWER_S} s.")
        found = json_file.read_if_valid(answer, kind)
        if found is None:
            why = f"{python()} {f'says: {last}' if (last := last_line(said)) else f'ended with code {code}'}"
            return kind(fault=f"{source.file}: it cannot be found out what it defines. {why}")
    entries = found.workloads if isinstance(found, Description) else found.strategies
    if any(entry.code != source.digest for entry in entries):
        return kind(fault=f"{source.file}: changed while it was read; run the command again.")
    return found


def _run(argv: Sequence[str], folder: str, said: Path) -> int | None:
    """Run a process; return its exit code, or None if it took longer than ANSWER_S.

    folder: the working directory of the process. said: the file for its output. The output is not read from a pipe, because
    the code of the user may start another process that keeps the pipe open for ever.
    """
    with said.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env=environment(), start_new_session=True
        )
        try:
            return process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def last_line(path: Path) -> str:
    """The last line that a process wrote to a file; empty if the process wrote nothing."""
    with files.open_regular(path) as handle:
        handle.seek(max(0, path.stat().st_size - MOST_SAID))
        lines = handle.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
