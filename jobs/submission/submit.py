"""Decides for every run of a matrix whether the run must be submitted, and submits runs. With --dry-run, it only decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from jobs.planning.repeats import rounds
from jobs.plugins import own_copies, own_plugins
from jobs.rendering import frozen_source, render
from jobs.scheduler import SubmitOptions, scheduler
from jobs.status import retry_budget
from jobs.status.reconcile import Status, latest, not_replaceable, statuses
from jobs.supervisor import hold
from shardlab.errors import InputError, ShardlabError
from shardlab.matrix import batch_search
from shardlab.matrix.cell import Cell
from shardlab.runs import search_path
from shardlab.runs.checkpoint import CheckpointManifest, read, whole, why_not
from shardlab.runs.record import Sample, read_lines
from shardlab.runs.run import Run, attempt_of, run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.search_path import SearchPath
from shardlab.runs.state import FINAL
from shardlab.workspace.workspace import Workspace
from trainers import menu

HELD = "held"  # a word that `jobs retry --only` accepts besides states; the state of a held run is pending or planned
# A node whose last telemetry sample is this many seconds older than the newest sample of the other nodes is lost. At a normal
# end of a run, telemetry stops on all nodes within a few seconds.
SILENT_S = 10.0


class RunDecision(msgspec.Struct, frozen=True):
    """The decision on one run.

    run: the run.json of the attempt. send: whether the run is submitted. why: the reason for the decision. now: the status of
    the last attempt at the run; None if the run has no folder. held_back: whether the run is rendered but not submitted,
    because it would not end before the lease of the nodes.
    """

    run: Run
    send: bool
    why: str
    now: Status | None = None
    held_back: bool = False


def check(
    workspace: Workspace,
    cells: Sequence[Cell],
    repeats: Mapping[str, int],
    source: render.RenderContext,
    resume_from: str | None = None,
) -> None:
    """Check the runs of the workspace before anything is changed.

    Raises InputError if one of these runs was submitted to another cluster, or if the cells cannot resume from the checkpoint
    of the run `resume_from`. repeats: the number of runs of each cell, by the name of the cell.
    """
    if resume_from:
        _can_go_on(workspace.run(resume_from), cells)
    for folder in _there(workspace, _wanted(workspace, cells, repeats, source)).values():
        must_be_of_cluster(folder, source)


def decide(
    workspace: Workspace,
    cells: Sequence[Cell],
    repeats: Mapping[str, int],
    source: render.RenderContext,
    resume_from: str | None = None,
) -> list[RunDecision]:
    """The decision on every repeat of every cell, in the order in which the runs are submitted.

    repeats: the number of runs of each cell, by the name of the cell. resume_from: the id of the run from whose checkpoint new
    runs resume; None: they start from step 0.
    """
    resume = [resume_from] if resume_from else []
    wanted = _wanted(workspace, cells, repeats, source)
    last = _there(workspace, wanted)
    known = {attempt_of(status.id)[0]: status for status in statuses(workspace, list(last.values()))}
    steps = []
    for cell, repeat, path in wanted:
        run = render.run_of(cell, repeat, 1, source, resume)
        now = known.get(run.run_id)
        if now is not None and now.state == "planned":
            now = not_replaceable(last[run.run_id]) or now
        if now is None:
            why = f"its search goes on after {path.in_words}" if path is not None and path.tries else "new"
            steps.append(RunDecision(run, True, why))
        elif now.state == "planned":
            steps.append(RunDecision(_anew(last[run.run_id], run, source), True, "was rendered", now))
        elif (again := _within_budget(last[run.run_id], now, source)) is not None:
            steps.append(again)
        else:
            answer = path.answer if path is not None else ""
            why = now.why if now.is_unreadable else f"its search has ended: {answer}" if answer else _why_not(now)
            steps.append(RunDecision(run, False, why, now))
    return steps


def _wanted(
    workspace: Workspace, cells: Sequence[Cell], repeats: Mapping[str, int], source: render.RenderContext
) -> list[tuple[Cell, int, SearchPath | None]]:
    """Each run as (cell, repeat, the path of its search or None), in the order in which they run. If the batch size of a cell
    is searched, the cell of the next try is returned, or the cell of the last try if the search has ended."""
    wanted: list[tuple[Cell, int, SearchPath | None]] = []
    for cell, repeat in rounds(cells, repeats):
        search = source.search_of(cell)
        path = search_path.walk(workspace.runs, cell, search, repeat) if search is not None else None
        wanted.append((cell if path is None else path.current, repeat, path))
    return wanted


def _there(workspace: Workspace, wanted: Sequence[tuple[Cell, int, SearchPath | None]]) -> dict[str, RunDir]:
    """For each of these runs that has a folder, the folder of its last attempt, by the run id of the first attempt."""
    names = {run_id(cell, repeat) for cell, repeat, _ in wanted}
    last = {attempt_of(folder.run_id)[0]: folder for folder in latest(workspace.all_runs())}
    return {name: folder for name, folder in last.items() if name in names}


def send(workspace: Workspace, steps: Iterable[RunDecision], source: render.RenderContext, how: SubmitOptions) -> list[RunDir]:
    """Carry out decisions: release held runs, then render and submit the other runs whose `send` is true, in order.

    Runs that are held back are only rendered, and the reason is written into their events. how: the options of the submission.
    Returns the folders of the runs that were submitted. Raises ShardlabError if the scheduler rejects a run.
    """
    steps = list(steps)
    sent = [step for step in steps if step.send]
    released = [step for step in sent if step.now is not None and step.now.held and step.now.state == "pending"]
    hold.release(workspace, [step.run for step in released])
    new = [step.run for step in sent if step not in released]
    back = [step for step in steps if step.held_back]
    if new or back:
        frozen_source.freeze(Path(source.source))
        own_copies.freeze(workspace, source.own.sources)
    for step in back:
        render.write(step.run, workspace.runs, source).write_event("controller", "held", why=step.why)
    folders = [render.write(run, workspace.runs, source) for run in new]
    if folders:
        scheduler(source.scheduler).submit(workspace, folders, how)
        frozen_source.remove_unused(workspace, Path(source.source))
    return folders


def retry(
    workspace: Workspace, selected: Sequence[Status], only: set[str], source: render.RenderContext, *, trust: bool = False
) -> list[RunDecision]:
    """Decide on a new attempt for each run whose last attempt, among the selected runs, ended in one of the states `only`.

    - The new attempt has the whole budget of `retry` again, because a person asked for it.
    - The new attempt resumes from the newest checkpoint of the earlier attempts, if there is a checkpoint. The ranks check
      whether the checkpoint is intact.
    - A run that is rendered but not submitted, because an earlier retry or a queue returned it, is submitted without changes.
    - If `only` contains HELD, held runs are released; they stay the same attempt.

    trust: whether code that came with a fetched run may be executed. Nothing is changed. Raises InputError if one of these runs
    was submitted to another cluster, or if its code must not be executed.
    """
    steps = []
    last_ones = {folder.run_id for folder in latest(RunDir(workspace.runs / status.id) for status in selected)}
    for now in (status for status in selected if status.id in last_ones):
        folder = RunDir(workspace.runs / now.id)
        if now.held and now.state == "pending" and HELD in only:
            must_be_of_cluster(folder, source)
            run = hold.accepting(folder.read_run(), source.packages, source.versions)
            steps.append(RunDecision(run, True, "was held; goes on with the packages that are installed now", now))
            continue
        unsent = now.state == "planned" and (attempt_of(now.id)[1] > 1 or now.why != "")
        if (now.state not in only and not unsent) or now.is_unreadable:
            continue
        must_be_of_cluster(folder, source)
        old = folder.read_run()
        own = own_plugins.of_run(workspace, old, trust=trust)
        searches = {batch_search.family(old.cell): old.search} if old.search is not None else {}
        same_matrix = msgspec.structs.replace(
            source, matrix=old.matrix, track=old.track, own=own, searches=searches, retry=old.retry
        )
        if unsent:
            attempt = attempt_of(now.id)[1]
            again = render.run_of(old.cell, old.repeat, attempt, same_matrix, old.resume, old.avoid, old.traces, old.retried)
            kept = not_replaceable(folder)
            steps.append(
                RunDecision(again, True, "was rendered", now) if kept is None else RunDecision(again, False, kept.why, kept)
            )
            continue
        steps.append(_next_attempt(folder, old, now, same_matrix))
    return steps


def _next_attempt(
    folder: RunDir, old: Run, now: Status, source: render.RenderContext, retried: Sequence[str] = ()
) -> RunDecision:
    """The decision to submit the attempt after `old`, whose folder and status are given. retried: as in `Run`."""
    saved = retry_budget.resumable(folder.path.parent, old)
    avoid = dict.fromkeys([*old.avoid, *(lost_nodes(folder, now.hosts) if now.state == "node_fail" else [])])
    resume = [name for name, _ in saved]
    run = render.run_of(old.cell, old.repeat, old.attempt + 1, source, resume, list(avoid), old.traces, retried)
    resumes = f", resumes from its checkpoint at step {saved[0][1]}" if saved else ""
    return RunDecision(run, True, f"attempt {run.attempt} after {now.state}{resumes}", now)


def _within_budget(folder: RunDir, now: Status, source: render.RenderContext) -> RunDecision | None:
    """The decision to start a run again within its budget, where its supervisor could not do it: the supervisor was killed, or
    its machine restarted. None if the run must not be started again by itself.

    folder, now: the folder and the status of the last attempt. A run that reached its time limit is not started again here,
    because its supervisor has already decided whether to start it. A run that completed or was cancelled is never started
    again, so its records are not read. On Slurm, only the supervisor and Slurm start a run again.
    """
    if source.scheduler == "slurm" or now.is_unreadable or now.state not in FINAL - {"timeout", "completed", "cancelled"}:
        return None
    old = folder.read_run()
    if not retry_budget.is_left(folder, old, now.state):
        return None
    return _next_attempt(folder, old, now, source, [*old.retried, now.state])


def freeze_trusted(workspace: Workspace, steps: Sequence[RunDecision], *, trust: bool) -> None:
    """Store frozen copies of the plug-in code of the runs that get a new attempt, as if the code had been submitted from this
    workspace.

    The code of a run is stored if the user trusts the code, or if it is only the configuration of a model, which is data.
    """
    for old in (workspace.run(step.now.id).read_run() for step in steps if step.send and step.now is not None):
        if trust or (old.own_workload is not None and old.own_workload.is_data):
            own_copies.freeze(workspace, own_plugins.of_run(workspace, old, trust=trust).sources)


def lost_nodes(folder: RunDir, hosts: Sequence[str]) -> list[str]:
    """The names of the nodes that a run lost; empty if they are not known.

    Without Slurm, an event names the lost node. With Slurm, a node is lost if its telemetry stopped while the telemetry of the
    other nodes continued; a run on a single node has lost this node. hosts: the nodes on which the run was running.
    """
    if named := retry_budget.named_lost_nodes(folder):
        return named
    if len(hosts) == 1:
        return list(hosts)
    last_s = {
        host: max((s.wall_s for s in read_lines(folder.samples_file(host), Sample).records), default=None) for host in hosts
    }
    latest_s = max((wall_s for wall_s in last_s.values() if wall_s is not None), default=0.0)
    return [host for host, wall_s in last_s.items() if wall_s is not None and wall_s < latest_s - SILENT_S]


def _anew(folder: RunDir, run: Run, source: render.RenderContext) -> Run:
    """The run.json with which a run that was rendered but not submitted is rendered again. If the run is a later attempt, it
    still resumes from the same runs.

    folder: the run's folder. run: the first attempt as it would be rendered now.
    """
    attempt = attempt_of(folder.run_id)[1]
    if attempt == 1:
        return run
    old = folder.read_run()
    return render.run_of(run.cell, run.repeat, attempt, source, old.resume, old.avoid, old.traces, old.retried)


def _can_go_on(saved: RunDir, cells: Sequence[Cell]) -> None:
    paths, theirs = whole(saved.path), saved.read_run().cell
    manifest = read(paths[0]) if paths else f"{saved.path}: has no checkpoint"
    if not isinstance(manifest, CheckpointManifest):
        raise InputError(f"--resume-from: {manifest}.")
    for cell in cells:
        options = [option.name for option in menu.workload_of(cell).options]
        why = why_not(theirs, cell, manifest.layout, options)
        if cell.instruments.checkpoints is None:
            why = "the cell keeps no checkpoints itself (instruments.checkpoints)"
        if why is not None:
            raise InputError(f"--resume-from: {cell.name()} cannot resume from {saved.run_id}: {why}.")


def _why_not(now: Status) -> str:
    if now.held:
        return now.why
    if now.state in ("pending", "running", "completed"):
        return f"{now.state} already"
    if now.state == "unknown" and now.scheduler["id"] == "-":
        return f"unknown: {now.why}"
    if now.expected:
        return f"ended as expected: {now.state}"
    return f"ended: {now.state} (`jobs retry --only {now.state}` makes a new attempt)"


def must_be_of_cluster(folder: RunDir, source: render.RenderContext) -> None:
    """Raises InputError if a run was rendered for another cluster. No error for a run whose records cannot be read; such a run
    is skipped later."""
    try:
        theirs = folder.read_run().cluster
    except ShardlabError:
        return
    if theirs != render.cluster_of(source):
        raise InputError(
            f"{folder.path}: was run on cluster {theirs.get('name')!r}, not {source.where.name!r}; runs of two "
            "clusters cannot be compared as one matrix. Use another --workspace for each cluster."
        )
