"""The verb `jobs logs`."""

from __future__ import annotations

import time
from pathlib import Path

from jobs.status.reconcile import find_unreadable_status
from jobs.verb import JobsVerb
from shardlab import completion
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.terminal.console import Output, Parser
from shardlab.terminal.printable import LogCleaner
from shardlab.verb import Invocation
from shardlab.workspace.workspace import Workspace

LOG_INTERVAL_S = 0.5
LOG_PART_BYTES = 2**20  # bytes of a log that are read at a time


class LogsVerb(JobsVerb):
    """Print the logs of a run."""

    name = "logs"
    example = "jobs logs 'ddp-gpt2-tiny-*-r1' --rank 1 --follow"
    reads_runs = True

    def add_options(self, parser: Parser) -> None:
        run_help = "a run: its id, the beginning of the id, its short name, or a shell pattern that matches one run"
        completion.offer_completions(parser.add_argument("run_id", metavar="RUN", help=run_help), Workspace.list_run_ids)
        rank_help = "print the log of rank N (default: the log of the launcher, then the log of rank 0)"
        parser.add_argument("--rank", type=int, metavar="N", help=rank_help)
        parser.add_argument("--follow", action="store_true", help="keep printing new output until the run has ended")
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        run_dir = RunDir(workspace.runs / workspace.match_run(arguments.run_id))
        unreadable_status = find_unreadable_status(run_dir)
        if unreadable_status is not None:
            out.print_remark(f"{unreadable_status.id}: {unreadable_status.why}", style="red")
        elif arguments.rank is not None and not 0 <= arguments.rank < (world_size := run_dir.read_run().world.world_size):
            raise InputError(f"--rank: found {arguments.rank}. Allowed: 0 to {world_size - 1}.")
        if run_dir.is_rehearsal():
            out.print_remark(f"note: {run_dir.run_id} is a {REHEARSAL_NOTE}.")
        log_paths = [run_dir.rank_log(arguments.rank)] if arguments.rank is not None else [run_dir.job_log, run_dir.rank_log(0)]
        positions = dict.fromkeys(log_paths, 0)
        log_cleaners = {log_path: LogCleaner() for log_path in log_paths}
        while True:
            has_ended = unreadable_status is not None or run_dir.judge().state not in ("pending", "running")
            for log_path in log_paths:
                positions[log_path] = _print_log_from(out, log_path, positions[log_path], log_cleaners[log_path])
            if not arguments.follow or has_ended:
                return int(unreadable_status is not None)
            time.sleep(LOG_INTERVAL_S)


def _print_log_from(out: Output, log_path: Path, position: int, log_cleaner: LogCleaner) -> int:
    """Print the log from byte `position` to its end; return the place of the byte after the last printed byte.

    log_cleaner: decodes the bytes of this log.
    """
    if not log_path.exists():
        return position
    with files.open_regular(log_path) as log_handle:
        log_handle.seek(position)
        while log_part := log_handle.read(LOG_PART_BYTES):
            out.print_log(log_cleaner, log_part)
            position += len(log_part)
    return position
