"""`collect fetch`: copies runs from the cluster, checks their files, and prints what was fetched."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from collect.fetching import request
from collect.loading import unreadable_runs
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace


def show(workspace: Workspace, patterns: Sequence[str], output: Output, *, prunes: bool, confirmed: bool) -> int:
    """Fetch runs, print a table of them, and return the exit code: 1 if a run is damaged or was not fetched completely.

    patterns: shell patterns of run ids; if there are none, all runs are fetched. prunes: whether to remove the fetched files on
    the cluster (--prune). confirmed: whether the files are removed without asking the user (--yes). Raises InputError if
    --prune is not possible or cannot be confirmed, or if a pattern matches no run.
    """
    if prunes:
        from collect.fetching import prune

        prune.must_be_elsewhere(workspace)
        if not confirmed and not sys.stdin.isatty():
            raise InputError("--prune was not confirmed. Allowed: the option --yes, or the answer `yes` on a terminal.")
    with request.asked(workspace, patterns, output) as conversation:
        from collect.fetching import fetch, progress  # imported while the cluster starts its program

        with progress.shown(output) as shown:
            fetched = fetch.fetch(workspace, patterns, conversation, shown)
    columns = ["Run", "State", "Files (n)", "Size (KiB)", "Hashed (n)", "Truncated files (n)", "Corrupt lines (n)"]
    rows = [
        [run.run, run.state, *(f"{n:,}" for n in (run.files, run.bytes // 1024, run.hashed, run.truncated, run.corrupt))]
        for run in fetched
    ]
    output.table("", columns, rows)
    for run in fetched:
        if run.damage:
            output.remark(f"{run.run}: damaged records: {run.damage}", style="yellow")
        for name in run.added:
            output.detail(f"{run.run}: {name}: the file is new since the run was fetched")
        for problem in run.problems:
            output.remark(f"{run.run}: {problem}", style="red")
        for sentence in run.parts:
            output.remark(f"{run.run}: {sentence}", style="red")
        for name, kind in run.not_regular.items():
            output.remark(
                f"{run.run}: {name} is {kind}; only regular files and folders with names in UTF-8 are fetched", style="red"
            )
    changed = sum(bool(run.problems) for run in fetched)
    if changed:
        output.remark(
            f"{changed} of {len(fetched)} runs differ from their manifest.json or from the cluster; their manifest.json was "
            "not changed. To resolve this for a run, remove its manifest.json and run the same command again."
        )
    elif not fetched:
        output.remark(f"{workspace.runs}: no runs yet.")
    unreadable_runs.show(output, [(RunDir(workspace.runs / run.run), run.unreadable) for run in fetched])
    is_freed = True
    if prunes:
        from collect.fetching import prune_command

        is_freed = prune_command.free(output, workspace, fetched, is_confirmed=confirmed)
    output.document(fetched)
    return 0 if is_freed and all(run.is_sound for run in fetched) else 1
