"""What is the same for all verbs that submit runs: finish interrupted submissions, decide once, then send or print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from jobs.planning import datasets
from jobs.planning.gpu_hours import must_be_within_gpu_hours
from jobs.planning.plan import MatrixPlan, estimate_hours, must_run_here
from jobs.planning.repeats import order_runs_by_repeat
from jobs.rendering import render
from jobs.rendering.render import RenderContext, make_run, render_script
from jobs.scheduler import SchedulerFull, SubmitOptions, find_scheduler
from jobs.status import stale_jobs
from jobs.status.reconcile import Status
from jobs.submission import lease_schedule, preflight, submit
from jobs.submission.backlog import Backlog
from jobs.submission.submit import RunDecision
from jobs.verbs import views, watch
from shardlab.cluster.lease import Lease
from shardlab.errors import InputError
from shardlab.matrix.cell import AnyCell
from shardlab.runs.run import Run
from shardlab.terminal.console import Output
from shardlab.verb import Invocation
from shardlab.workspace import inventory, workspace_trust
from shardlab.workspace.workspace import Workspace


class SubmitPlan(msgspec.Struct, frozen=True):
    """What a command submits. It is made once, and then it is either printed (--dry-run) or sent."""

    decisions: Sequence[RunDecision]
    """The decision on each run, in the order in which the runs are submitted."""
    context: RenderContext
    """What all runs have in common."""
    remarks: Sequence[str] = ()
    """Notes for the user about the plan of the matrix."""
    lease: Lease | None = None
    """The lease of the nodes; None if they are not lent."""


def submit_runs(
    invocation: Invocation,
    context: RenderContext,
    submit_options: SubmitOptions,
    decide: Callable[[], list[RunDecision]],
    plan: MatrixPlan | None = None,
    *,
    has_training: bool = True,
) -> int:
    """Submit runs; with --dry-run, only print which runs would be submitted. Returns the exit code.

    decide: decides on each run, after the submissions of interrupted commands were finished. plan: the plan of the matrix; None
    if the runs are not those of a matrix. has_training: as for `must_run_here`. Raises ShardlabError; if it is an InputError,
    nothing was submitted.
    """
    out, workspace, arguments = invocation.out, invocation.workspace, invocation.arguments
    backlog = None
    if getattr(arguments, "dry_run", False):
        return _print_dry_run(invocation, _plan_submission(invocation, decide(), context, submit_options, plan))
    must_run_here(context, allow_login_node=arguments.here, has_training=has_training)
    with workspace.hold_runs_lock():
        all_readable = _finish_interrupted(invocation, context)
        submit_plan = _plan_submission(invocation, decide(), context, submit_options, plan)
        if plan is not None:
            render.store_expansion(workspace, context, plan.matrix, plan.all_cells, plan.repeats_by_cell)
        try:
            submit.send_runs(workspace, submit_plan.decisions, context, submit_options)
        except SchedulerFull as full_error:
            if not arguments.wait:
                raise
            backlog = Backlog(workspace, context.scheduler, submit_options, full_error)
    _print_decisions(out, submit_plan, backlog)
    for remark in submit_plan.remarks:
        out.print_remark(f"note: {remark}")
    if backlog:
        out.print_remark(
            f"note: Slurm accepts no more jobs for now ({backlog.problem}); the rest is submitted when there is room."
        )
    skipped = [decision.status for decision in submit_plan.decisions if decision.status is not None and not decision.is_sent]
    all_readable = tidy_runs(out, workspace, skipped, of_scheduler=False) and all_readable
    run_ids = [decision.run.run_id for decision in submit_plan.decisions]
    code = watch.wait_and_report(out, workspace, run_ids, wait=arguments.wait, backlog=backlog)
    return code if all_readable and not any(decision.is_held_back for decision in submit_plan.decisions) else max(code, 1)


def _plan_submission(
    invocation: Invocation,
    decisions: list[RunDecision],
    context: RenderContext,
    submit_options: SubmitOptions,
    plan: MatrixPlan | None,
) -> SubmitPlan:
    """Hold back the runs that would not end before the lease, and check the other runs. No run folder is written.

    plan: the plan of the matrix, for --max-gpu-hours. Raises InputError if the runs that are to be submitted may take more
    GPU hours than --max-gpu-hours, or if Slurm would reject one of them.
    """
    leased_inventory = inventory.read_leased_inventory(invocation.workspace, context.cluster.name)
    if leased_inventory is not None and not submit_options.ignore_lease:
        decisions = lease_schedule.hold_back_late_runs(
            invocation.workspace, leased_inventory, decisions, context, submit_options
        )
    runs = [decision.run for decision in decisions if decision.is_sent]
    if plan is not None and (most_hours := invocation.arguments.max_gpu_hours) is not None:
        if not (0 < most_hours < 1e9):
            raise InputError(f"--max-gpu-hours: found {most_hours:.12g}. Allowed: a number above 0.")
        counts = Counter(plan.find_planned_name(run.cell) for run in runs)
        must_be_within_gpu_hours(most_hours, [hours for hours in estimate_hours(plan, counts) if counts[hours.cell.name()]])
    if context.scheduler == "slurm" and context.preview is None:  # the commands here may be those of another Slurm
        preflight.must_be_accepted(runs, context, pack=submit_options.is_packed)
    remarks = plan.remarks if plan is not None else ()
    return SubmitPlan(decisions, context, remarks, leased_inventory.lease if leased_inventory is not None else None)


def must_have_data(out: Output, workspace: Workspace, cells: Sequence[AnyCell], context: RenderContext) -> None:
    """Raises InputError if a data set of these cells is missing; prints a note if it is unknown whether nodes have the data
    sets."""
    missing_data = datasets.find_missing_data(cells, context, workspace)
    if missing_data.unknown:
        out.print_remark(f"note: {missing_data.unknown}")
    datasets.must_have_data(missing_data)


def _finish_interrupted(invocation: Invocation, context: RenderContext) -> bool:
    """Finish submissions of earlier commands that were interrupted, and print what was done.

    Returns whether every record of the scheduler can be read.
    """
    for sentence in find_scheduler(context.scheduler).finish_interrupted(invocation.workspace):
        invocation.out.print_remark(sentence)
    damage_sentences = find_scheduler(context.scheduler).describe_damaged_records(invocation.workspace)
    for sentence in damage_sentences:
        invocation.out.print_remark(sentence, style="red")
    return not damage_sentences


def tidy_runs(out: Output, workspace: Workspace, statuses: Sequence[Status], *, of_scheduler: bool = True) -> bool:
    """Cancel jobs that are still queued although their runs have ended, and print every record that cannot be read.

    of_scheduler: whether to check the schedulers' own records as well. Returns whether all such jobs were cancelled and every
    record can be read.
    """
    cancelled = stale_jobs.cancel_stale_jobs(statuses if workspace_trust.is_allowed(workspace) else [])
    for sentence in cancelled.sentences:
        out.print_remark(sentence)
    scheduler_names = {run.scheduler["name"] for run in statuses if not run.is_unreadable} if of_scheduler else set()
    unreadable_runs = print_unreadable(out, statuses)
    damage_sentences = [
        sentence for name in sorted(scheduler_names) for sentence in find_scheduler(name).describe_damaged_records(workspace)
    ]
    for sentence in damage_sentences:
        out.print_remark(sentence, style="red")
    return cancelled.are_all_cancelled and not unreadable_runs and not damage_sentences


def print_unreadable(out: Output, statuses: Sequence[Status]) -> int:
    """Print every run that is skipped because its records cannot be read, with the reason; return the number of such runs."""
    unreadable_statuses = [status for status in statuses if status.is_unreadable]
    for status in unreadable_statuses:
        out.print_remark(f"{status.id}: {status.why}", style="red")
    return len(unreadable_statuses)


def _print_dry_run(invocation: Invocation, submit_plan: SubmitPlan) -> int:
    """Print what would be submitted, with --verbose also the scripts. Returns the exit code: 1 if the records of a run cannot
    be read."""
    out, decisions = invocation.out, submit_plan.decisions
    _print_decisions(out, submit_plan, would_be="would be ")
    unreadable_count = print_unreadable(out, [decision.status for decision in decisions if decision.status is not None])
    if out.verbose:
        _print_scripts(invocation, [decision.run for decision in decisions if decision.is_sent], submit_plan.context)
    _print_preview_note(out, submit_plan.context)
    for remark in submit_plan.remarks:
        out.print_remark(f"note: {remark}")
    out.print_document([{"id": decision.run.run_id, "send": decision.is_sent, "why": decision.why} for decision in decisions])
    return int(unreadable_count > 0)


def print_preview(invocation: Invocation, plan: MatrixPlan) -> int:
    """Print the scripts of the runs of a plan, which start on another machine. Returns the exit code."""
    runs = [make_run(cell, repeat, 1, plan.context) for cell, repeat in order_runs_by_repeat(plan.cells, plan.repeats_by_cell)]
    folders = _print_scripts(invocation, runs, plan.context)
    invocation.out.print_line(f"{len(runs)} script(s) printed; nothing was written. To write them: --out DIR.")
    for remark in plan.remarks:
        invocation.out.print_remark(f"note: {remark}")
    _print_preview_note(invocation.out, plan.context)
    invocation.out.print_document([{"id": run.run_id, "path": folder} for run, folder in zip(runs, folders, strict=True)])
    return 0


def _print_scripts(invocation: Invocation, runs: Sequence[Run], context: RenderContext) -> list[str]:
    """Print the script of each run after the path that the script will have. Returns the paths of the runs' folders."""
    runs_dir = invocation.workspace.runs if context.preview is None else context.preview.workspace_path / "runs"
    for run in runs:
        run_folder = runs_dir / run.run_id
        script = render_script(run, run_folder, context.cluster, context.own_templates, context.preview)
        commented_script = f"\n# {run_folder}/{find_scheduler(context.scheduler).SCRIPT}\n{script}"
        if not invocation.out.print_script(commented_script):
            invocation.out.print_line(commented_script)  # with its unprintable characters replaced
    return [str(runs_dir / run.run_id) for run in runs]


def _print_preview_note(out: Output, context: RenderContext) -> None:
    if context.preview is not None:
        further_clause = ", and asks Slurm whether it accepts the requests" if context.scheduler == "slurm" else ""
        out.print_remark(
            f"note: made from the cluster file, without asking {context.cluster.name}: "
            f"`jobs submit` asks it for the data sets{further_clause}."
        )


def _print_decisions(out: Output, submit_plan: SubmitPlan, backlog: Backlog | None = None, would_be: str = "") -> None:
    """Print a line for each run that says what is done with the run and why, then the lease of the nodes.

    backlog: the runs that a full scheduler did not accept and that the command submits while it waits; None: no such runs.
    would_be: "would be " in a dry run.
    """
    decisions = submit_plan.decisions
    queued = {folder.run_id for folder in backlog.folders} if backlog else set()
    for decision in decisions:
        if decision.status is not None and decision.status.is_unreadable:
            continue  # the caller prints runs whose records cannot be read, with the reason
        outcome = decision.why if decision.is_held_back else f"skipped: {decision.why}"
        if decision.is_sent:
            outcome = f"{'waits to be ' if decision.run.run_id in queued else would_be}submitted ({decision.why})"
        out.print_line(f"{decision.run.run_id}: {outcome}", style=None if decision.is_sent else "dim")
    send_count = sum(decision.is_sent for decision in decisions)
    held_back_count = sum(decision.is_held_back for decision in decisions)
    wait_clause = f", {len(queued)} wait for room" if queued else ""
    held_clause = f", {held_back_count} {would_be}held back" if held_back_count else ""
    skip_count = len(decisions) - send_count - held_back_count
    out.print_line(f"{send_count - len(queued)} run(s) {would_be}submitted{wait_clause}{held_clause}, {skip_count} skipped.")
    views.print_lease(out, submit_plan.lease)
