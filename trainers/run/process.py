"""The process of one rank, from start to end: redirects its output to a log and records how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, plugin_source
from shardlab.hardware.nccl_log import NCCL_LOG
from shardlab.plugins import own_code
from shardlab.plugins.plugin_kind import STRATEGIES, WORKLOADS
from shardlab.runs import checkpoint
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from trainers import menu
from trainers.plugins import own_strategy
from trainers.ranks import hang_dump, stage, world_check
from trainers.ranks.out_of_memory import is_out_of_memory, read_memory_sizes
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks


def run_rank(run_folder: Path) -> str:
    """Train as one rank of the run whose folder is `run_folder`. All output goes to the rank's log.

    Returns the backend of the process group when the run is complete. If an error occurs, an event of the run, a traceback in
    the log and one sentence on the launcher's standard error are written. Then the process exits at once with code 1; if it did
    not exit, the other ranks would hang in a collective. Raises InputError if `run_folder` is not the folder of a run, or if
    the launcher's environment is contradictory.
    """
    run_dir = RunDir(run_folder.absolute())
    run, process_rank = run_dir.read_run(), Rank.from_environment(os.environ)
    launcher_stderr = _redirect_output(run_dir.rank_log(process_rank.rank))
    for name, value in NCCL_LOG.items():  # `collect` reads from the log whether the run used RDMA
        os.environ.setdefault(name, value)
    hang_dump.start_timer(run.cell.hang_limit_s)
    try:
        _check_start(run, run_dir, process_rank)
        if (workload := run.own_workload) is not None:
            menu.add_own_workload(workload, run_dir.path / WORKLOADS.folder / Path(workload.file).name)
        if (strategy := run.own_strategy) is not None:
            own_strategy.add_strategies(run_dir.path / STRATEGIES.folder / Path(strategy.file).name, run.cell.strategy_code)
        from trainers.run import loop  # imported inside `try`, so that an error of the import is recorded too

        # The timeout includes wait_gpus_s: each node waits for its own GPUs before it starts its ranks, so the ranks of some
        # nodes may start earlier than others.
        ranks = Ranks(process_rank, run.cell.servers, run.cell.hang_limit_s + run.wait_gpus_s)
        world_check.check_world(run, run_dir, ranks)
        loop.train(run, run_dir, ranks)
        ranks.leave_group()
        return ranks.backend
    except BaseException as error:  # noqa: BLE001 - every error that ends a rank must be recorded
        _end_process(error, run_dir, process_rank, launcher_stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def summarize_error(error: BaseException, run_folder: Path | None = None) -> str:
    """An error as one line: its type and the first line of its message; for errors of shardlab, only the first line.

    run_folder: the folder of the run. If the error was raised in one of the run's plug-in files, the line names this file
    and the line
    in it.
    """
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, ShardlabError):
        return first_line
    error_text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    folders = [run_folder / name for name in plugin_source.CARRIED_FOLDERS] if run_folder is not None else []
    error_location = next((location for folder in folders if (location := own_code.find_error_line(error, folder))), None)
    return error_text if error_location is None else f"{error_location}: {error_text}"


def _name_error_event(error: BaseException) -> str:
    """The name of the event with which a rank records an error: `timeout`, `oom` or `failed`."""
    checkpoints = sys.modules.get("trainers.instruments.checkpoints")
    if checkpoints is not None and isinstance(error, checkpoints.OutOfTime):
        return "timeout"
    return "oom" if is_out_of_memory(error) else "failed"


def _check_start(run: Run, run_dir: RunDir, process_rank: Rank) -> None:
    """Raises InputError if the launcher started a wrong number of ranks, or if the run has already written records."""
    if process_rank.world_size != run.world.world_size:
        raise InputError(
            f"{run_dir.path}: the launcher started {process_rank.world_size} ranks. Allowed: {run.world.world_size}, "
            "as run.json says (world.world_size)."
        )
    steps_file = run_dir.steps_file(process_rank.rank)
    has_records = steps_file.exists() and steps_file.stat().st_size and not checkpoint.list_checkpoints(run_dir.path)
    if run_dir.result.exists() or has_records:
        raise InputError(f"{run_dir.path}: has records already; another attempt needs a run of its own.")


def _redirect_output(log_path: Path) -> int:
    """Redirect standard output and standard error, also of libraries in C, to the log. Returns a file descriptor of the
    previous standard error, which belongs to the launcher."""
    files.make_folder(log_path.parent)
    with files.as_workspace_error("write"):
        log_file = files.open_append(log_path)
    previous_stderr = os.dup(2)  # os.dup returns a descriptor that programs started by this rank do not inherit
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    return previous_stderr


def _end_process(error: BaseException, run_dir: RunDir, process_rank: Rank, launcher_stderr: int) -> NoReturn:
    try:
        traceback.print_exception(error)
        sys.stderr.flush()
        event_name = _name_error_event(error)
        failed_stage = stage.find_stage_of_error(error)
        why = summarize_error(error, run_dir.path)
        if event_name == "oom" and failed_stage is not None:
            why = f"{why} (while {failed_stage})"
        os.write(launcher_stderr, f"rank {process_rank.rank}: {why}\n".encode())
        signal_name = getattr(error, "signal", None) if event_name == "timeout" else None
        bytes_by_kind: dict[str, Any] = read_memory_sizes(error) if event_name == "oom" else {}
        event_writer = f"rank-{process_rank.rank:05d}"
        run_dir.write_event(event_writer, event_name, why=why, stage=failed_stage, signal=signal_name, **bytes_by_kind)
    finally:
        os._exit(1)
