"""The steps that are the same for all verbs that submit runs: finish interrupted submissions, submit, and print what was
submitted."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.invocation import Invocation
from jobs.rendering import render
from jobs.scheduler import SchedulerFull, SubmitOptions, scheduler
from jobs.status import stale_jobs
from jobs.status.reconcile import Status
from jobs.submission import preflight, submit
from jobs.submission.backlog import Backlog
from jobs.verbs import views, watch
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace


def slurm_must_accept(decisions: Sequence[submit.RunDecision], source: render.RenderContext, options: SubmitOptions) -> None:
    """Raises InputError if Slurm would reject a run that is to be submitted, before any run folder is written."""
    if source.scheduler == "slurm":
        preflight.must_be_accepted([decision.run for decision in decisions if decision.send], source, pack=options.pack)


def finish_interrupted(out: Output, workspace: Workspace, source: render.RenderContext) -> bool:
    """Finish submissions of earlier commands that were interrupted, and print what was done.

    Returns whether every record of the scheduler can be read.
    """
    for sentence in scheduler(source.scheduler).resolve(workspace):
        out.print_remark(sentence)
    damaged = scheduler(source.scheduler).damaged(workspace)
    for sentence in damaged:
        out.print_remark(sentence, style="red")
    return not damaged


def tidy_runs(out: Output, workspace: Workspace, runs: Sequence[Status], *, of_scheduler: bool = True) -> bool:
    """Cancel jobs that are still queued although their runs have ended, and print every record that cannot be read.

    of_scheduler: whether to check the schedulers' own records as well. Returns whether all such jobs were cancelled and every
    record can be read.
    """
    cancelled = stale_jobs.cancel_stale_jobs(runs if workspace_trust.is_allowed(workspace) else [])
    for sentence in cancelled.sentences:
        out.print_remark(sentence)
    names = {run.scheduler["name"] for run in runs if not run.is_unreadable} if of_scheduler else set()
    unreadable = print_unreadable(out, runs)
    damaged = [sentence for name in sorted(names) for sentence in scheduler(name).damaged(workspace)]
    for sentence in damaged:
        out.print_remark(sentence, style="red")
    return cancelled.all_gone and not unreadable and not damaged


def print_unreadable(out: Output, runs: Sequence[Status]) -> int:
    """Print every run that is skipped because its records cannot be read, with the reason; return the number of such runs."""
    unreadable = [run for run in runs if run.is_unreadable]
    for run in unreadable:
        out.print_remark(f"{run.id}: {run.why}", style="red")
    return len(unreadable)


def send_runs(
    invocation: Invocation, decisions: Sequence[submit.RunDecision], source: render.RenderContext, options: SubmitOptions
) -> Backlog | None:
    """Submit the runs. With --wait, returns the runs that a full scheduler did not accept; otherwise None. Raises
    ShardlabError."""
    try:
        submit.send_runs(invocation.workspace, decisions, source, options)
    except SchedulerFull as full:
        if not invocation.arguments.wait:
            raise
        return Backlog(invocation.workspace, source.scheduler, options, full, ignore_lease=invocation.arguments.ignore_lease)
    return None


def report_sent(
    invocation: Invocation,
    decisions: Sequence[submit.RunDecision],
    backlog: Backlog | None,
    source: render.RenderContext,
    remarks: Sequence[str] = (),
) -> int:
    """Print what was submitted and the remarks, wait for the runs if --wait is given, and return the exit code."""
    out, workspace, wait = invocation.out, invocation.workspace, invocation.arguments.wait
    views.print_decisions(out, decisions, sent=True, waiting={folder.run_id for folder in backlog.folders} if backlog else ())
    views.print_lease(out, workspace, source.where.name)
    for remark in remarks:
        out.print_remark(f"note: {remark}")
    if backlog:
        out.print_remark(
            f"note: Slurm accepts no more jobs for now ({backlog.problem}); the rest is submitted when there is room."
        )
    skipped = [decision.now for decision in decisions if decision.now is not None and not decision.send]
    tidied = tidy_runs(out, workspace, skipped, of_scheduler=False)
    code = watch.wait_and_report(out, workspace, [decision.run.run_id for decision in decisions], wait=wait, backlog=backlog)
    return code if tidied and not any(decision.held_back for decision in decisions) else max(code, 1)
