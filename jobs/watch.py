"""Staying with runs: until they end, as a live table, as their logs, or to see a cancellation through."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.live import Live

from jobs import views
from jobs.reconcile import Status, latest
from jobs.reconcile import status as status_of
from jobs.schedulers import local
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.run import attempt_of
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace, chosen

POLL_S = 0.5
CANCEL_S = 30.0  # longer than a supervisor's grace before it kills


def finish(out: Output, workspace: Workspace, run_ids: Sequence[str], *, wait: bool) -> int:
    """The end of submit and retry: with `wait` stay until all runs have ended; exit code 1 where one did not end well."""

    last = {attempt_of(folder.run_id)[0]: folder for folder in latest(workspace.all_runs())}
    folders = [last[attempt_of(run_id)[0]] for run_id in run_ids]

    def look() -> list[Status]:
        return [status_of(workspace, folder) for folder in folders]

    if not wait:
        out.document({"runs": look()})
        return 0
    found = _until_ended(out, workspace, look)
    out.line(views.summary(found))
    for one in found:
        if not one.expected:
            out.line(f"{one.id}: {one.state}: {one.why}", style="red")
    out.document({"runs": found})
    return 0 if all(one.expected for one in found) else 1


def status(out: Output, workspace: Workspace, look: Callable[[], list[Status]]) -> int:
    """`jobs status --watch`: until all have ended or Ctrl-C; it changes nothing and starts nothing."""
    found = _until_ended(out, workspace, look, restart=False)
    views.status(out, found, workspace)
    return 0


def cancel(workspace: Workspace, runs: Sequence[Status]) -> list[Status]:
    """Cancel runs, those that wait first so that none starts meanwhile, and see them end; what they came to."""
    for one in sorted(runs, key=lambda run: run.state == "running"):
        folder = RunDir(workspace.runs / one.id)
        local.cancel(folder, folder.judge())
    deadline = time.monotonic() + CANCEL_S
    while True:
        now = [status_of(workspace, RunDir(workspace.runs / one.id)) for one in runs]
        if all(one.state in FINAL for one in now) or time.monotonic() > deadline:
            return now
        time.sleep(POLL_S)


def logs(workspace: Workspace, pattern: str, rank: int | None, *, follow: bool) -> int:
    """Print the log of one run: of a rank, or the launcher's and then rank 0's."""
    matches = chosen(workspace.run_ids(), [pattern])
    if len(matches) > 1:
        raise InputError(f"{pattern!r} fits {len(matches)} runs: {', '.join(matches[:5])}. Allowed: one run.")
    folder = workspace.run(matches[0])
    world = folder.read_run().world.world_size
    if rank is not None and not 0 <= rank < world:
        raise InputError(f"--rank: found {rank}. Allowed: 0 to {world - 1}.")
    files = [folder.rank_log(rank)] if rank is not None else [folder.job_log, folder.rank_log(0)]
    places = dict.fromkeys(files, 0)
    while True:
        ended = status_of(workspace, folder).state not in ("pending", "running")
        for file in files:
            places[file] = _print_from(file, places[file])
        if not follow or ended:
            return 0
        time.sleep(POLL_S)


def _until_ended(out: Output, workspace: Workspace, look: Callable[[], list[Status]], *, restart: bool = True) -> list[Status]:
    """Look again and again; a table that renews itself on a terminal, a line a change elsewhere."""
    found = look()
    if out.results.is_terminal and not out.json:
        with Live(views.live(found), console=out.results, auto_refresh=False) as screen:
            while not _ended(found):
                _rest(workspace, found, restart=restart)
                found = look()
                screen.update(views.live(found), refresh=True)
        return found
    before: dict[str, str] = {}
    while True:
        for one in found:
            if before.get(one.id) != one.state:
                out.line(f"{one.id}: {one.state}" + (f": {one.why}" if one.why else ""))
            before[one.id] = one.state
        if _ended(found):
            return found
        _rest(workspace, found, restart=restart)
        found = look()


def _ended(found: Sequence[Status]) -> bool:
    return not any(one.state in ("pending", "running") for one in found)


def _rest(workspace: Workspace, found: Sequence[Status], *, restart: bool) -> None:
    if restart and any(one.state == "pending" for one in found) and not local.runner_alive(workspace):
        local.ensure_runner(workspace)  # somebody killed it; what waits shall not wait for ever
    time.sleep(POLL_S)


def _print_from(file: Path, place: int) -> int:
    """Print what a log holds from a byte on; the byte after the last one printed. Bytes that are no text show as such."""
    if not file.exists():
        return place
    with file.open("rb") as handle:
        handle.seek(place)
        text = handle.read()
    sys.stdout.write(text.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return place + len(text)
