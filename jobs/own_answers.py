"""What the plug-ins of a workspace are: found out by a process of its own, never by `jobs`, and kept by their digest."""

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

from jobs import own_copies
from shardlab import files, model_file, own_workload, plugin_source, source_digest
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError
from shardlab.login_node import PYTHON
from shardlab.own_strategy import StrategyDescription
from shardlab.own_workload import Description
from shardlab.plugin_source import PluginSource
from shardlab.workspace import Workspace

ANSWER_S = 600  # importing torch from a cold network disk takes minutes
MOST_SAID = 1 << 16  # bytes at the end of what a process printed

D = TypeVar("D", Description, StrategyDescription)


def described(workspace: Workspace, source: PluginSource, kind: type[D], seq_len: int | None = None) -> D:
    """What the file defines. seq_len: of a model by its configuration. Raises InputError with the fault of the file."""
    key = "".join((source.digest, source_digest.source(), source_digest.packages(), str(seq_len or "")))
    head = source.name if kind is Description else f"strategies.{source.name}"
    kept = own_copies.store(workspace) / f"{head}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return decoder(kind).decode(files.read(kept))
    except (OSError, *DECODE_FAULTS):
        found = _asked(source, kind, seq_len)
    if found.fault:
        raise InputError(found.fault)
    files.make_folder(kept.parent)
    for earlier in kept.parent.glob(f"{head}-{'?' * 16}.json"):  # of the file before it was edited
        earlier.unlink(missing_ok=True)
    files.write_json(kept, found, sync=False)
    return found


def python() -> str:
    """The interpreter that executes the code of users."""
    return os.environ.get(PYTHON, sys.executable)


def environment() -> dict[str, str]:
    """The environment of a process that executes the code of users to find out what it is: without GPUs and downloads."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _asked(source: PluginSource, kind: type[D], seq_len: int | None) -> D:
    """What a process of its own finds out. Its output and its end are the file's matter as well as ours."""
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer, said, file = Path(folder) / "answer.json", Path(folder) / "said", source.file
        if file.suffix == model_file.SUFFIX:  # in the spelling of the runs; the user's file may have another
            plugin_source.write(Path(folder) / own_workload.FOLDER, source)
            file = Path(folder) / own_workload.FOLDER / file.name
        length: list[str] = [] if seq_len is None else ["--seq-len", str(seq_len)]
        code = _run([python(), "-P", "-m", "trainers", "describe", str(file), *length, "--out", str(answer)], folder, said)
        if code is None:
            return kind(fault=f"{source.file}: its code did not end within {ANSWER_S} s.")
        try:
            found = decoder(kind).decode(files.read(answer))
        except (OSError, *DECODE_FAULTS):
            why = f"{python()} {f'says: {last}' if (last := _last_line(said)) else f'ended with code {code}'}"
            return kind(fault=f"{source.file}: it cannot be found out what it defines. {why}")
    entries = found.workloads if isinstance(found, Description) else found.strategies
    if any(entry.code != source.digest for entry in entries):
        return kind(fault=f"{source.file}: changed while it was read; run the command again.")
    return found


def _run(argv: Sequence[str], folder: str, said: Path) -> int | None:
    """The exit code of a process; None if it took too long. What it prints is in the file `said`: another process that the code
    started may keep a pipe open for ever."""
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


def _last_line(path: Path) -> str:
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - MOST_SAID))
        lines = handle.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
