"""Decides for every run of a matrix whether the run must be submitted, and submits runs. With --dry-run, it only decides."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jobs.planning.repeats import order_runs_by_repeat
from jobs.plugins import own_plugins, plugin_store
from jobs.rendering import frozen_source, render
from jobs.scheduler import SubmitOptions, find_scheduler
from jobs.status import retry_budget
from jobs.status.reconcile import Status, find_blocking_status, read_statuses, select_last_attempts
from jobs.supervisor import hold
from shardlab.errors import InputError, ShardlabError
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import batch_search
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.runs import search_path
from shardlab.runs.checkpoint import CheckpointManifest, explain_refused_resume, list_checkpoints, read_manifest
from shardlab.runs.record import Sample, read_records
from shardlab.runs.run import Run, make_run_id, split_attempt
from shardlab.runs.rundir import RunDir
from shardlab.runs.search_path import SearchPath
from shardlab.runs.state import FINAL_STATES
from shardlab.workspace.workspace import Workspace
from trainers import menu

HELD = "held"  # a word that `jobs retry --only` accepts besides states; the state of a held run is pending or planned
# A node whose last telemetry sample is this many seconds older than the newest sample of the other nodes is lost. At a normal
# end of a run, telemetry stops on all nodes within a few seconds.
LOST_AFTER_S = 10.0


class RunDecision(msgspec.Struct, frozen=True):
    """The decision on one run."""

    run: Run
    """The run.json of the attempt."""
    is_sent: bool
    """Whether the run is submitted."""
    why: str
    """The reason for the decision."""
    status: Status | None = None
    """The status of the last attempt at the run; None if the run has no folder."""
    is_held_back: bool = False
    """Whether the run is rendered but not submitted, because it would not end before the lease of the nodes."""
    plugin_sources: Sequence[PluginSource] = ()
    """The code of the run's plug-ins that this workspace does not have yet, because it came with a fetched run."""


def check_runs(
    workspace: Workspace,
    cells: Sequence[AnyCell],
    repeats_by_cell: Mapping[str, int],
    context: render.RenderContext,
    resume_from: str | None = None,
) -> None:
    """Check the runs of the workspace before anything is changed.

    Raises InputError if one of these runs was submitted to another cluster, or if the cells cannot resume from the checkpoint
    of the run `resume_from`. repeats_by_cell: the number of runs of each cell, by the name of the cell.
    """
    if resume_from:
        _must_be_resumable(workspace.find_run_dir(resume_from), cells)
    for folder in _find_last_folders(workspace, _list_wanted_runs(workspace, cells, repeats_by_cell, context)).values():
        must_be_of_cluster(folder, context)


def decide_runs(
    workspace: Workspace,
    cells: Sequence[AnyCell],
    repeats_by_cell: Mapping[str, int],
    context: render.RenderContext,
    resume_from: str | None = None,
) -> list[RunDecision]:
    """The decision on every repeat of every cell, in the order in which the runs are submitted.

    repeats_by_cell: the number of runs of each cell, by the name of the cell. resume_from: the id of the run from whose
    checkpoint new runs resume; None: they start from step 0.
    """
    resume_ids = [resume_from] if resume_from else []
    wanted_runs = _list_wanted_runs(workspace, cells, repeats_by_cell, context)
    last_folders = _find_last_folders(workspace, wanted_runs)
    statuses_by_id = {split_attempt(status.id)[0]: status for status in read_statuses(workspace, list(last_folders.values()))}
    decisions = []
    for cell, repeat, search_path_of_run in wanted_runs:
        run = render.make_run(cell, repeat, 1, context, resume_ids)
        last_status = statuses_by_id.get(run.run_id)
        if last_status is not None and last_status.state == "planned":
            last_status = find_blocking_status(last_folders[run.run_id]) or last_status
        if last_status is None:
            decision_reason = (
                f"its search goes on after {search_path_of_run.description}"
                if search_path_of_run is not None and search_path_of_run.tries
                else "new"
            )
            decisions.append(RunDecision(run, True, decision_reason))
        elif last_status.state == "planned":
            decisions.append(
                RunDecision(_make_run_again(last_folders[run.run_id], run, context), True, "was rendered", last_status)
            )
        elif (retry_decision := _decide_within_budget(last_folders[run.run_id], last_status, context)) is not None:
            decisions.append(retry_decision)
        else:
            search_answer = search_path_of_run.answer_text if search_path_of_run is not None else ""
            decision_reason = (
                last_status.why
                if last_status.is_unreadable
                else f"its search has ended: {search_answer}"
                if search_answer
                else _explain_no_send(last_status)
            )
            decisions.append(RunDecision(run, False, decision_reason, last_status))
    return decisions


def _list_wanted_runs(
    workspace: Workspace, cells: Sequence[AnyCell], repeats_by_cell: Mapping[str, int], context: render.RenderContext
) -> list[tuple[AnyCell, int, SearchPath | None]]:
    """Each run as (cell, repeat, the path of its search or None), in the order in which they run. If the batch size of a cell
    is searched, the cell of the next try is returned, or the cell of the last try if the search has ended."""
    wanted_runs: list[tuple[AnyCell, int, SearchPath | None]] = []
    for cell, repeat in order_runs_by_repeat(cells, repeats_by_cell):
        search = context.find_search(cell)
        path = (
            search_path.follow_search(workspace.runs, cell.require_training(), search, repeat) if search is not None else None
        )
        wanted_runs.append((cell if path is None else path.current_cell, repeat, path))
    return wanted_runs


def _find_last_folders(
    workspace: Workspace, wanted_runs: Sequence[tuple[AnyCell, int, SearchPath | None]]
) -> dict[str, RunDir]:
    """For each of these runs that has a folder, the folder of its last attempt, by the run id of the first attempt."""
    first_ids = {make_run_id(cell, repeat) for cell, repeat, _ in wanted_runs}
    last_folders = {split_attempt(run_dir.run_id)[0]: run_dir for run_dir in select_last_attempts(workspace.list_run_dirs())}
    return {first_id: run_dir for first_id, run_dir in last_folders.items() if first_id in first_ids}


def send_runs(
    workspace: Workspace, decisions: Sequence[RunDecision], context: render.RenderContext, submit_options: SubmitOptions
) -> None:
    """Carry out decisions: release held runs, then render and submit the other runs whose `send` is true, in order.

    Runs that are held back are only rendered, and the reason is written into their events. submit_options: the options of the
    submission. Raises ShardlabError if the scheduler rejects a run."""
    sent_decisions = [decision for decision in decisions if decision.is_sent]
    released_decisions = [
        decision for decision in sent_decisions if decision.status is not None and decision.status.is_held_in_queue
    ]
    hold.release_runs(workspace, [decision.run for decision in released_decisions])
    new_runs = [decision.run for decision in sent_decisions if decision not in released_decisions]
    held_back_decisions = [decision for decision in decisions if decision.is_held_back]
    if new_runs or held_back_decisions:
        frozen_source.freeze_source(Path(context.source))
        own_plugins.freeze_plugins(workspace, context.plugins)
        sent_code = (decision.plugin_sources for decision in decisions if decision.is_sent or decision.is_held_back)
        plugin_store.freeze_sources(workspace, itertools.chain.from_iterable(sent_code))
    for decision in held_back_decisions:
        render.write_run_folder(decision.run, workspace.runs, context).write_event("controller", "held", why=decision.why)
    run_dirs = [render.write_run_folder(run, workspace.runs, context) for run in new_runs]
    if run_dirs:
        find_scheduler(context.scheduler).submit(workspace, run_dirs, submit_options)
        frozen_source.remove_unused_copies(workspace, Path(context.source))


def decide_retries(
    workspace: Workspace, runs: Sequence[Status], states: set[str], render_source: render.RenderContext, *, trust: bool = False
) -> list[RunDecision]:
    """Decide on a new attempt for each run whose last attempt, among the selected runs, ended in one of the states
    `states`.

    - The new attempt has the whole budget of `retry` again, because a person asked for it.
    - The new attempt resumes from the newest checkpoint of the earlier attempts, if there is a checkpoint. The ranks check
      whether the checkpoint is intact.
    - A run that is rendered but not submitted, because an earlier retry or a queue returned it, is submitted without changes.
    - If `states` contains HELD, held runs are released; they stay the same attempt. Runs whose jobs Slurm holds after a failed
      start are released in any case.

    trust: whether code that came with a fetched run may be executed. Nothing is changed. Raises InputError if one of these runs
    was submitted to another cluster, or if its code must not be executed.
    """
    decisions = []
    last_ids = {run_dir.run_id for run_dir in select_last_attempts(RunDir(workspace.runs / status.id) for status in runs)}
    for last_status in (status for status in runs if status.id in last_ids):
        run_dir = RunDir(workspace.runs / last_status.id)
        if last_status.is_held_after_launch:
            must_be_of_cluster(run_dir, render_source)
            decisions.append(RunDecision(run_dir.read_run(), True, "was held by Slurm after a failed start", last_status))
            continue
        if last_status.is_held_in_queue and HELD in states:
            must_be_of_cluster(run_dir, render_source)
            held_run = run_dir.read_run()
            environment = render_source.read_environment(held_run.cell.environment)
            run = hold.accept_packages(held_run, environment.packages, environment.versions)
            decisions.append(RunDecision(run, True, "was held; goes on with the packages that are installed now", last_status))
            continue
        is_unsent = last_status.state == "planned" and (split_attempt(last_status.id)[1] > 1 or last_status.why != "")
        if (last_status.state not in states and not is_unsent) or last_status.is_unreadable:
            continue
        must_be_of_cluster(run_dir, render_source)
        old_run = run_dir.read_run()
        plugins = own_plugins.read_run_plugins(workspace, old_run, trust=trust)
        context = _make_context_of_run(render_source, old_run, plugins)
        if is_unsent:
            attempt = split_attempt(last_status.id)[1]
            rendered_run = render.make_run(
                old_run.cell, old_run.repeat, attempt, context, old_run.resume, old_run.avoid, old_run.retried
            )
            blocking_status = find_blocking_status(run_dir)
            why = "was rendered" if blocking_status is None else blocking_status.why
            status = blocking_status or last_status
            decisions.append(RunDecision(rendered_run, blocking_status is None, why, status, plugin_sources=plugins.sources))
            continue
        decisions.append(_decide_next_attempt(run_dir, old_run, last_status, context))
    return decisions


def _make_context_of_run(context: render.RenderContext, old_run: Run, plugins: own_plugins.OwnPlugins) -> render.RenderContext:
    """The context with which a new attempt at a run is rendered. plugins: the plug-ins of the run."""
    search, traces = old_run.search, old_run.traces
    return msgspec.structs.replace(
        context,
        matrix=old_run.matrix,
        track=old_run.track,
        plugins=plugins,
        search_by_family={} if search is None else {batch_search.compute_search_hash(old_run.training_cell): search},
        retry=old_run.retry,
        trace_part_by_cell={} if traces is None else {old_run.cell.name(): traces},
    )


def _decide_next_attempt(
    run_dir: RunDir, old_run: Run, status: Status, context: render.RenderContext, retried: Sequence[str] = ()
) -> RunDecision:
    """The decision to submit the attempt after `old_run`, whose folder and status are given. retried: as in `Run`."""
    resumable_attempts = retry_budget.list_resumable_attempts(run_dir.path.parent, old_run)
    avoided_nodes = dict.fromkeys(
        [*old_run.avoid, *(find_lost_nodes(run_dir, status.hosts) if status.state == "node_fail" else [])]
    )
    resume_ids = [name for name, _ in resumable_attempts]
    run = render.make_run(old_run.cell, old_run.repeat, old_run.attempt + 1, context, resume_ids, list(avoided_nodes), retried)
    resume_clause = f", resumes from its checkpoint at step {resumable_attempts[0][1]}" if resumable_attempts else ""
    why = f"attempt {run.attempt} after {status.state}{resume_clause}"
    return RunDecision(run, True, why, status, plugin_sources=context.plugins.sources)


def _decide_within_budget(run_dir: RunDir, status: Status, context: render.RenderContext) -> RunDecision | None:
    """The decision to start a run again within its budget, where its supervisor could not do it: the supervisor was killed, or
    its machine restarted. None if the run must not be started again by itself.

    folder, status: the folder and the status of the last attempt. A run that reached its time limit is not started again here,
    because its supervisor has already decided whether to start it. A run that completed or was cancelled is never started
    again, so its records are not read. On Slurm, only the supervisor and Slurm start a run again.
    """
    if (
        context.scheduler == "slurm"
        or status.is_unreadable
        or status.state not in FINAL_STATES - {"timeout", "completed", "cancelled"}
    ):
        return None
    old_run = run_dir.read_run()
    if not retry_budget.allows_retry(run_dir, old_run, status.state):
        return None
    return _decide_next_attempt(run_dir, old_run, status, context, [*old_run.retried, status.state])


def find_lost_nodes(run_dir: RunDir, hosts: Sequence[str]) -> list[str]:
    """The names of the nodes that a run lost; empty if they are not known.

    Without Slurm, an event names the lost node. With Slurm, a node is lost if its telemetry stopped while the telemetry of the
    other nodes continued; a run on a single node has lost this node. hosts: the nodes on which the run was running.
    """
    if recorded_nodes := retry_budget.read_lost_nodes(run_dir):
        return recorded_nodes
    if len(hosts) == 1:
        return list(hosts)
    last_sample_s = {
        host: max((sample.wall_s for sample in read_records(run_dir.samples_file(host), Sample).records), default=None)
        for host in hosts
    }
    newest_sample_s = max((wall_s for wall_s in last_sample_s.values() if wall_s is not None), default=0.0)
    return [host for host, wall_s in last_sample_s.items() if wall_s is not None and wall_s < newest_sample_s - LOST_AFTER_S]


def _make_run_again(run_dir: RunDir, run: Run, context: render.RenderContext) -> Run:
    """The run.json with which a run that was rendered but not submitted is rendered again. If the run is a later attempt, it
    still resumes from the same runs.

    run_dir: the run's folder. run: the first attempt as it would be rendered now.
    """
    attempt = split_attempt(run_dir.run_id)[1]
    if attempt == 1:
        return run
    old_run = run_dir.read_run()
    return render.make_run(run.cell, run.repeat, attempt, context, old_run.resume, old_run.avoid, old_run.retried)


def _must_be_resumable(saved_run: RunDir, cells: Sequence[AnyCell]) -> None:
    checkpoint_paths, saved_cell = list_checkpoints(saved_run.path), saved_run.read_run().cell
    manifest = read_manifest(checkpoint_paths[0]) if checkpoint_paths else f"{saved_run.path}: has no checkpoint"
    if not isinstance(manifest, CheckpointManifest):
        raise InputError(f"--resume-from: {manifest}.")
    for cell in cells:
        if not isinstance(cell, Cell):
            raise InputError(f"--resume-from: {cell.name()} is a command, which resumes only from its own attempts.")
        option_names = [option.name for option in menu.find_workload_of_cell(cell).options]
        refusal = explain_refused_resume(saved_cell, cell, manifest.layout, option_names)
        if cell.instruments.checkpoints is None:
            refusal = "the cell keeps no checkpoints itself (instruments.checkpoints)"
        if refusal is None and cell.steps is not None and manifest.step >= cell.steps:
            refusal = f"its newest checkpoint is of step {manifest.step}, and the cell has {cell.steps} steps"
        if refusal is not None:
            raise InputError(f"--resume-from: {cell.name()} cannot resume from {saved_run.run_id}: {refusal}.")


def _explain_no_send(status: Status) -> str:
    if status.held:
        return status.why
    if status.state in ("pending", "running", "completed"):
        return f"{status.state} already"
    if status.state == "unknown" and status.scheduler["id"] == "-":
        return f"unknown: {status.why}"
    if status.expected:
        return f"ended as expected: {status.state}"
    return f"ended: {status.state} (`jobs retry --only {status.state}` makes a new attempt)"


def must_be_of_cluster(run_dir: RunDir, context: render.RenderContext) -> None:
    """Raises InputError if a run was rendered for another cluster. No error for a run whose records cannot be read; such a run
    is skipped later."""
    try:
        run_cluster = run_dir.read_run().cluster
    except ShardlabError:
        return
    if (run_cluster.get("name"), run_cluster.get("provider")) != (context.cluster.name, context.cluster.provider):
        raise InputError(
            f"{run_dir.path}: was run on cluster {run_cluster.get('name')!r}, not {context.cluster.name!r}; runs of "
            "two clusters cannot be compared as one matrix. Use another --workspace for each cluster."
        )
