"""Follows runs: waits for their end (submit --wait, cancel), shows a live table (status --watch), prints their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group
from rich.live import Live

from jobs import leftovers, status_table, views
from jobs.left import Left
from jobs.reconcile import Status, latest, own, set_aside, statuses
from jobs.scheduler import apart, scheduler
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.printable import LogText
from shardlab.run import attempt_of
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace, chosen

LOGS_S = 0.5
LOG_PART = 2**20  # bytes that are read of a log at a time
CANCEL_S = 60.0  # longer than a supervisor's grace before it kills, and Slurm's before it does


def finish(out: Output, workspace: Workspace, run_ids: Sequence[str], *, wait: bool, left: Left | None = None) -> int:
    """The last part of submit and retry; returns the exit code, which is 1 if a run did not end as expected.

    wait: wait until all runs have ended. left: runs that the scheduler had no room for, which are submitted when it has room.
    """

    if not wait and not out.json:
        return 0
    last = {attempt_of(folder.run_id)[0]: folder for folder in latest(workspace.all_runs())}
    folders = [last[attempt_of(run_id)[0]] for run_id in run_ids]

    def look() -> list[Status]:
        return statuses(workspace, folders)

    if not wait:
        out.document({"runs": look()})
        return 0
    try:
        found = _until_ended(out, workspace, look, left=left)
    finally:
        if left is not None and (unsent := left.unsent()):
            names = ", ".join(folder.run_id for folder in unsent[:3]) + (", ..." if len(unsent) > 3 else "")
            again = "Run the same command again to submit them."
            out.remark(f"{len(unsent)} run(s) are not submitted ({left.problem}): {names}. {again}")
        if left is not None and left.unanswered is not None:
            out.remark(str(left.unanswered))
    out.line(status_table.summary(found))
    given_back: dict[str, list[str]] = {}
    for one in found:
        if one.state == "planned" and one.why:
            given_back.setdefault(one.why, []).append(one.id)
        elif not one.expected and not one.set_aside:  # which its command has said
            out.line(f"{one.id}: {one.state}: {one.why}", style="red")
    for why, runs in given_back.items():
        names = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        out.line(f"{len(runs)} run(s) did not start ({names}): {why}.", style="red")
    cancelled = leftovers.cancel(found)
    for sentence in cancelled.sentences:
        out.remark(sentence)
    out.document({"runs": found})
    return 0 if cancelled.all_gone and all(one.expected for one in found) else 1


def status(out: Output, workspace: Workspace, look: Callable[[], list[Status]]) -> list[Status]:
    """`jobs status --watch`: until all have ended or Ctrl-C; it starts nothing."""
    found = _until_ended(out, workspace, look, restart=False)
    views.status(out, found, workspace)
    return found


def cancel(workspace: Workspace, runs: Sequence[Status]) -> list[Status]:
    """Cancel runs and wait until they have ended, at most CANCEL_S; return their statuses."""
    folders = [RunDir(workspace.runs / one.id) for one in runs]
    for name, known in apart(own(folder) for folder in folders).items():
        scheduler(name).cancel(workspace, known)
    deadline = time.monotonic() + CANCEL_S
    while True:
        now = statuses(workspace, folders)
        if all(one.state in FINAL for one in now) or time.monotonic() > deadline:
            return now
        time.sleep(_poll_s(now))


def logs(out: Output, workspace: Workspace, pattern: str, rank: int | None, *, follow: bool) -> int:
    """Print the log of one run: of a rank, or the launcher's and then rank 0's. The logs of a run that is set aside are printed
    as they are, and the exit code is 1."""
    matches = chosen(workspace.run_ids(), [pattern])
    if len(matches) > 1:
        raise InputError(f"{pattern!r} matches {len(matches)} runs: {', '.join(matches[:5])}. Allowed: one run.")
    folder = RunDir(workspace.runs / matches[0])
    damaged = set_aside(folder)
    if damaged is not None:
        out.remark(f"{damaged.id}: {damaged.why}", style="red")
    elif rank is not None and not 0 <= rank < (world := folder.read_run().world.world_size):
        raise InputError(f"--rank: found {rank}. Allowed: 0 to {world - 1}.")
    files = [folder.rank_log(rank)] if rank is not None else [folder.job_log, folder.rank_log(0)]
    places = dict.fromkeys(files, 0)
    texts = {file: LogText() for file in files}
    while True:
        ended = damaged is not None or folder.judge().state not in ("pending", "running")
        for file in files:
            places[file] = _print_from(out, file, places[file], texts[file])
        if not follow or ended:
            return int(damaged is not None)
        time.sleep(LOGS_S)


def _until_ended(
    out: Output, workspace: Workspace, look: Callable[[], list[Status]], *, restart: bool = True, left: Left | None = None
) -> list[Status]:
    """Poll until all runs have ended. Show a live table on a terminal, elsewhere print a line for each change."""
    found, sent = look(), False
    if out.results.is_terminal and not out.json:

        def drawn() -> Group:
            return views.live(found, *out.results.size)

        with Live(drawn(), console=out.results, auto_refresh=False) as screen:
            while left or sent or not _ended(found):
                _rest(workspace, found, restart=restart)
                found, sent = _looked(look, left)
                screen.update(drawn(), refresh=True)
        return found
    before: dict[str, str] = {}
    while True:
        for one in found:
            # What a queue gave back is said in one sentence at the end.
            if before.get(one.id) != one.state and not (one.state == "planned" and one.id in before):
                out.line(f"{one.id}: {one.state}" + (f": {one.why}" if one.why else ""))
            before[one.id] = one.state
        if _ended(found) and not left and not sent:
            return found
        _rest(workspace, found, restart=restart)
        found, sent = _looked(look, left)


def _looked(look: Callable[[], list[Status]], left: Left | None) -> tuple[list[Status], bool]:
    """The statuses, and whether runs were submitted after the statuses were read: then these are not final."""
    found = look()
    if not left:
        return found, False
    before = len(left.folders)
    left.attend(found)
    return found, len(left.folders) < before


def _ended(found: Sequence[Status]) -> bool:
    return not any(one.state in ("pending", "running") for one in found)


def _rest(workspace: Workspace, found: Sequence[Status], *, restart: bool) -> None:
    if restart and any(one.state == "pending" for one in found):
        for name in {one.scheduler["name"] for one in found if one.state == "pending"}:
            scheduler(name).attend(workspace)
    time.sleep(_poll_s(found))


def _poll_s(found: Sequence[Status]) -> float:
    """As often as the most patient of their schedulers may be asked."""
    names = {one.scheduler["name"] for one in found} - {"-"}
    return max((scheduler(name).POLL_S for name in names), default=LOGS_S)


def _print_from(out: Output, file: Path, place: int, log: LogText) -> int:
    """Print what a log holds from byte `place` on; the byte after the last printed byte."""
    if not file.exists():
        return place
    with file.open("rb") as handle:
        handle.seek(place)
        while part := handle.read(LOG_PART):
            out.log(log, part)
            place += len(part)
    return place
