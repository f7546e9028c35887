"""Prints the runs that a command skips because their records cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from shardlab.runs.rundir import RunDir
from shardlab.terminal.console import Output


def print_unreadable_runs(output: Output, runs: Iterable[tuple[RunDir, str]]) -> int:
    """Print the runs whose records cannot be read, with the reasons. Returns the exit code: 1 if any run is printed, else 0.

    runs: (folder of a run, why its records cannot be read; '' if they can be read).
    """
    exit_code = 0
    for folder, unreadable_reason in runs:
        if unreadable_reason:
            remedy = f"restore the file, or move the folder {folder.path} out of runs/, and run the same command again"
            output.print_remark(f"{folder.run_id}: set aside: {unreadable_reason.rstrip('.')}; {remedy}.", style="red")
            exit_code = 1
    return exit_code
