"""A rank of a run whose workload is a command of the user: starts the command, keeps its output, and records its steps.

    python -m jobs.node.command_rank RUN_DIR

Each launcher starts this program in place of a rank. The command runs in the folder `work` of the run, with the environment of
the rank; its exit code is the exit code of this program.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from types import FrameType

from jobs.node.rendezvous import read_master_variables
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.hardware import host
from shardlab.matrix import command
from shardlab.matrix.command import Command, StepSource
from shardlab.runs import command_run
from shardlab.runs.command_run import CommandStep
from shardlab.runs.record import SCHEMA, LineWriter
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.steps import CHECKSUMS_VARIABLE, FOLDER_VARIABLE, WARMUP_VARIABLE
from shardlab.terminal import console

POLL_S = 0.2  # seconds between two looks at a file to which a script writes its steps
MOST_LINE_BYTES = 1 << 16  # a longer line of output is kept, but no step is looked for in it
TAIL_BYTES = 1 << 16  # the end of the output in which the reason of a failure is looked for
# What PyTorch, CUDA, the kernel and Python print if memory is short.
_OUT_OF_MEMORY = re.compile(rb"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|^MemoryError\b", re.MULTILINE)


class StepWriter:
    """Writes a step record for each step that a script tells.

    The time of a step is the script's own number, or the time since the step before. Without a number, the time of the first
    step includes the start of the script, so it counts as a warm-up step.
    """

    def __init__(self, path: Path, rank: int, warmup_steps: int) -> None:
        # Of a script that does not count its data, the step is the unit, once for all ranks.
        self._units_of_step = int(rank == 0)
        self._warmup_left = warmup_steps
        self._lines, self._last_s = LineWriter(path), time.monotonic()
        self._last_step: int | None = None

    def write_step(self, values: dict[str, float]) -> None:
        """Write the record of a step, unless its number is not larger than that of the step before. values: by the names
        in command.STEP_NAMES."""
        now_s, step, loss = time.monotonic(), int(values["step"]), values.get("loss")
        if self._last_step is not None and step <= self._last_step:
            return
        reported_ms = values["ms"] if "ms" in values else 1000 * values["seconds"] if "seconds" in values else None
        is_first = self._last_step is None
        steps_since_last = 1 if self._last_step is None else step - self._last_step
        step_record = CommandStep(
            schema=SCHEMA,
            step=step,
            t_s=now_s,
            wall_s=time.time(),
            units=int(values.get("tokens", self._units_of_step)),
            step_ms=1000 * (now_s - self._last_s) / steps_since_last if reported_ms is None else reported_ms,
            loss=loss if loss is None or math.isfinite(loss) else None,
            warmup=self._warmup_left > 0 or (reported_ms is None and is_first),
            diverged=loss is not None and not math.isfinite(loss),
            counts_units="tokens" in values,
        )
        self._last_s, self._last_step, self._warmup_left = now_s, step, self._warmup_left - 1
        self._lines.write_record(step_record)


def main(argv: list[str]) -> int:
    """Run the command of a run as one rank; return its exit code. argv: RUN_DIR. Raises ShardlabError."""
    if len(argv) != 1:
        raise InputError("usage: python -m jobs.node.command_rank RUN_DIR")
    run_dir = RunDir(Path(argv[0]).absolute())
    run, rank = run_dir.read_run(), _read_number("RANK", "SLURM_PROCID", "SHARDLAB_NODE")
    if (cell_command := run.cell.command) is None:
        raise InputError(f"{run_dir.path}: has no command.")
    if run.launcher not in ("none", "srun") and (started_ranks := _read_number("WORLD_SIZE") or 1) != run.world.world_size:
        raise InputError(
            f"{run.launcher} started {started_ranks} rank(s) and not {run.world.world_size}. Allowed: "
            "`launcher_options` that keep the number of ranks."
        )
    if _read_number("LOCAL_RANK", "SLURM_LOCALID") == 0:
        files.make_folder(run_dir.environment_file(gethostname()).parent)
        files.write_json(run_dir.environment_file(gethostname()), host.read_host())
    if rank == 0:
        run_dir.write_event("rank-00000", "met", sync=False, world_size=run.world.world_size)
    files.make_folder(run_dir.steps_file(rank).parent)
    files.make_folder(run_dir.checksums_file(rank).parent)
    files.make_folder(run_dir.log)
    exit_code = _run_command(run_dir, run, cell_command, rank)
    if exit_code:
        _record_failure(run_dir, rank, exit_code)
    return 128 - exit_code if exit_code < 0 else exit_code


def _run_command(run_dir: RunDir, run: Run, cell_command: Command, rank: int) -> int:
    """Start the command and wait for its end. Returns its exit code, or the negative number of the signal that ended it."""
    words = command_run.list_command_words(run_dir, run, sys.executable)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **_list_torch_variables(run)}
    if "PYTHONSAFEPATH" not in run.cell.env:  # the run's script sets it for our own programs; a script imports files beside it
        environment.pop("PYTHONSAFEPATH", None)
    environment[CHECKSUMS_VARIABLE] = str(run_dir.checksums_file(rank).parent)
    if cell_command.steps is None:
        environment |= {FOLDER_VARIABLE: str(run_dir.steps_file(rank).parent), WARMUP_VARIABLE: str(run.cell.warmup_steps)}
    try:
        process = subprocess.Popen(
            words, cwd=run_dir.work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise InputError(f"{words[0]}: cannot be started on {gethostname()}: {error.strerror}.") from None

    def forward_signal(signal_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, forward_signal)
    assert isinstance(process.stdout, io.BufferedReader)
    source = cell_command.steps
    writer = StepWriter(run_dir.steps_file(rank), rank, run.cell.warmup_steps) if cell_command.steps is not None else None
    follower = StepFileFollower(run_dir.work / source.jsonl, source, writer) if source and writer and source.jsonl else None
    with files.open_append(run_dir.rank_log(rank)) as log_file:
        for line in _read_lines(process.stdout):
            log_file.write(line)
            log_file.flush()
            if source is None or writer is None or source.regex is None or len(line) > MOST_LINE_BYTES:
                continue
            if (step_values := command.read_step(source, line.decode(errors="replace"))) is not None:
                writer.write_step(step_values)
    exit_code = process.wait()
    if follower is not None:
        follower.finish()
    return exit_code


def _list_torch_variables(run: Run) -> dict[str, str]:
    """The variables of torch's `env://` method for a rank that Slurm started; empty if the launcher sets them itself."""
    if run.launcher != "srun":
        return {}
    local_rank = str(_read_number("SLURM_LOCALID"))
    size_variables = {"WORLD_SIZE": str(run.world.world_size), "LOCAL_WORLD_SIZE": str(run.world.nproc_per_node)}
    return {**read_master_variables(), **size_variables, "RANK": str(_read_number("SLURM_PROCID")), "LOCAL_RANK": local_rank}


def _read_lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """Yields the lines of a stream. A progress bar ends its lines with a carriage return, which counts as an end here."""
    unfinished_line = b""
    while chunk := stream.read1(MOST_LINE_BYTES):
        *lines, unfinished_line = re.split(rb"(?<=[\n\r])", unfinished_line + chunk)
        yield from lines
        if len(unfinished_line) > MOST_LINE_BYTES:
            yield unfinished_line
            unfinished_line = b""
    if unfinished_line:
        yield unfinished_line


class StepFileFollower:
    """Reads the steps that a script appends to a file, while the script runs."""

    def __init__(self, steps_path: Path, step_source: StepSource, step_writer: StepWriter) -> None:
        self._path, self._source, self._writer = steps_path, step_source, step_writer
        self._ended, self._position = threading.Event(), 0
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Read what the script wrote last."""
        self._ended.set()
        self._thread.join()
        self._read_new_lines()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._read_new_lines()

    def _read_new_lines(self) -> None:
        new_bytes = b""
        with contextlib.suppress(OSError), files.open_regular(self._path) as steps_file:
            steps_file.seek(self._position)
            new_bytes = steps_file.read()
        lines_end = new_bytes.rfind(b"\n") + 1
        self._position += lines_end
        for line in new_bytes[:lines_end].splitlines():
            if len(line) <= MOST_LINE_BYTES and (step_values := command.read_step(self._source, line.decode(errors="replace"))):
                self._writer.write_step(step_values)


def _record_failure(run_dir: RunDir, rank: int, exit_code: int) -> None:
    """Write the event that says why the command failed, by the end of its output."""
    with files.open_regular(run_dir.rank_log(rank)) as log_file:
        log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - TAIL_BYTES))
        output_tail = log_file.read()
    last_line = next((line for line in reversed(output_tail.decode(errors="replace").splitlines()) if line.strip()), "")
    event_kind = "oom" if _OUT_OF_MEMORY.search(output_tail) else "failed"
    end_clause = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by {signal.Signals(-exit_code).name}"
    run_dir.write_event(f"rank-{rank:05d}", event_kind, why=f"the command {end_clause}: {last_line.strip()[:300]}".rstrip(": "))


def _read_number(*variable_names: str) -> int:
    """The first of these environment variables that is set, as a number; 0 if none is set."""
    return int(next((value for variable_name in variable_names if (value := os.environ.get(variable_name))), "0"))


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
