"""The command `jobs`: plans, renders, submits and tracks the runs of a matrix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs import on_controller
from jobs.invocation import Invocation
from jobs.planning import datasets, plan
from jobs.rendering import render
from jobs.run_queue import list_code_files, list_waiting_files
from jobs.status.reconcile import Status
from jobs.status.select import select_runs
from jobs.submission import lease_schedule, submit
from jobs.verbs import adapted_matrix, archived_matrix, menus, planner_verbs, sending, shared_options, trace_runs, views, watch
from shardlab import completion
from shardlab.errors import InputError, ShardlabError, UnknownName
from shardlab.matrix.cell import Cell
from shardlab.remote import remote_workspace
from shardlab.runs import state
from shardlab.terminal import console
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

INTERRUPTED = "interrupted; runs that were started continue, and their state is saved."
RETRIED_BY_DEFAULT = "failed,node_fail,preempted,hung"
MAY_BE_RETRIED = state.FINAL | {"unknown", submit.HELD}
START_VERBS = ("submit", "retry", "trace")  # verbs after which a runner starts the waiting runs of the workspace
# The verbs that do more than read and draw, and what they do, for the question whether they may.
ACTIONS = {**dict.fromkeys(START_VERBS, "start runs"), "render": "use the templates of the workspace", "cancel": "cancel runs"}
EXAMPLES = {
    "plan": "jobs plan --matrix quickstart",
    "render": "jobs render --matrix quickstart --out /tmp/scripts",
    "submit": "jobs submit --matrix quickstart --wait",
    "status": "jobs status --watch",
    "logs": "jobs logs 'ddp-gpt2-tiny-*-r1' --rank 1 --follow",
    "cancel": "jobs cancel --where \"strategy == 'ddp'\"",
    "retry": "jobs retry --only failed,node_fail",
    "advise": "jobs advise --workload gpt2-large --gpus 8 --gpu a100 --link nvlink",
    "trace": "jobs trace /scratch/alice/traces --cluster cluster.yaml --wait",
    "matrices": "jobs matrices",
    "strategies": "jobs strategies --json",
    "workloads": "jobs workloads",
    "launchers": "jobs launchers",
}
EPILOG = """example:
  jobs submit --matrix quickstart --wait

`jobs` is also a builtin command of your shell. Each of these lines runs this program instead:
  env jobs status        shardlab jobs status
  eval "$(shardlab shell-init)"     after this line, `jobs status` runs this program too
"""


def parser() -> console.Parser:
    """The parser of the command line of `jobs`, with all verbs."""
    common = console.common_options()
    top_parser = console.Parser(
        prog="jobs",
        description="Plan, render, submit and track the runs of a matrix of strategies and GPU counts.",
        epilog=EPILOG,
        parents=[common],
    )
    console.add_version_option(top_parser)
    verbs = console.Verbs(top_parser, common, EXAMPLES, sentences=True)
    for add in (_add_plan, _add_render, _add_submit, _add_status, _add_cancel, _add_retry, _add_logs):
        add(verbs)
    planner_verbs.add_advise(verbs)
    trace_runs.add_trace(verbs)
    verbs.add("matrices", menus.make_menu_verb(menus.print_matrices), "list the matrices that ship with shardlab")
    strategies_help = "list the strategies, also those of the workspace, and their options"
    console.add_trust_option(verbs.add("strategies", menus.make_own_menu_verb(menus.print_strategies), strategies_help))
    workloads_help = "list the workloads, also those of the workspace, and their options"
    console.add_trust_option(verbs.add("workloads", menus.make_own_menu_verb(menus.print_workloads), workloads_help))
    verbs.add("launchers", menus.make_menu_verb(menus.print_launchers), "list the launchers, which start the ranks of a run")
    return top_parser


def _add_plan(verbs: console.Verbs) -> None:
    verb = verbs.add("plan", _plan, "print the cells of a matrix, and which cells it excludes and why")
    shared_options.add_matrix_options(verb)
    adapted_matrix.add_adapt(verb)
    planner_verbs.add_plan_options(verb)
    planner_verbs.add_rehearse(verb)


def _add_render(verbs: console.Verbs) -> None:
    verb = verbs.add("render", _render, "write the run folders with their scripts, but submit nothing")
    shared_options.add_matrix_options(verb)
    verb.add_argument("--out", metavar="DIR", help="folder for the run folders (default: runs/ of the workspace)")


def _add_submit(verbs: console.Verbs) -> None:
    verb = verbs.add("submit", _submit, "render and submit the runs of a matrix that were not submitted before")
    shared_options.add_matrix_options(verb, archives=True)
    adapted_matrix.add_adapt(verb)
    shared_options.add_wait(verb)
    after_help = "on Slurm: start after these runs have ended (run id or shell pattern)"
    completion.offer_completions(verb.add_argument("--after", metavar="RUN", help=after_help), Workspace.run_ids)
    dry_run_help = "print what would be submitted, and submit nothing; with -v also print the scripts"
    verb.add_argument("--dry-run", action="store_true", help=dry_run_help)
    resume_help = (
        "resume from a checkpoint of this run; cells may differ from it only in their ranks and how the ranks share the batch "
        "(if the checkpoint has the layout `whole`, also in their strategy)"
    )
    inside_help = "inside `salloc` or a notebook's job: run the cells in this allocation, one after another"
    verb.add_argument("--in-allocation", action="store_true", help=inside_help)
    planner_verbs.add_fit_check(verb)
    bound_help = "submit nothing if the runs may take more GPU hours: by recorded times, else by time limits; retries count"
    verb.add_argument("--max-gpu-hours", type=float, metavar="N", help=bound_help)
    completion.offer_completions(verb.add_argument("--resume-from", metavar="RUN", help=resume_help), Workspace.run_ids)
    shared_options.add_track(verb)
    shared_options.add_sharing_options(verb)


def _add_status(verbs: console.Verbs) -> None:
    verb = verbs.add("status", _status, "show the state of runs; cancel queued Slurm jobs whose runs have ended")
    shared_options.add_run_selection(verb)
    verb.add_argument("--watch", action="store_true", help="show a live table until all runs have ended or you press Ctrl-C")
    console.add_trust_option(verb)


def _add_cancel(verbs: console.Verbs) -> None:
    verb = verbs.add("cancel", _cancel, "cancel runs that are pending or running")
    shared_options.add_run_selection(verb)
    verb.add_argument("--all", action="store_true", help="cancel every run of the workspace that has not ended")
    console.add_trust_option(verb)


def _add_retry(verbs: console.Verbs) -> None:
    verb = verbs.add("retry", _retry, "submit a new attempt of runs that failed (see --only)")
    shared_options.add_run_selection(verb)
    shared_options.add_wait(verb)
    shared_options.add_sharing_options(verb)
    only_help = (
        f"retry runs that ended in one of these states (default: {RETRIED_BY_DEFAULT}); held: let runs start that were held "
        "because the installed packages changed or the lease was too short"
    )
    verb.add_list_option("--only", ends_list=_selects_runs, default=RETRIED_BY_DEFAULT, metavar="STATE,...", help=only_help)
    console.add_trust_option(verb)


def _selects_runs(word: str) -> bool:
    return not MAY_BE_RETRIED.issuperset(word.strip(",").split(","))  # else the word is a state after --only


def _add_logs(verbs: console.Verbs) -> None:
    verb = verbs.add("logs", _logs, "print the logs of a run")
    run_help = "a run id, or a shell pattern that matches exactly one run"
    completion.offer_completions(verb.add_argument("run_id", metavar="RUN", help=run_help), Workspace.run_ids)
    rank_help = "print the log of rank N (default: the log of the launcher, then the log of rank 0)"
    verb.add_argument("--rank", type=int, metavar="N", help=rank_help)
    verb.add_argument("--follow", action="store_true", help="keep printing new output until the run has ended")
    console.add_trust_option(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this machine or on the controller of its cluster; return its exit code."""
    command_words = sys.argv[1:] if argv is None else argv
    command_line = parser()
    completion.answer_shell(command_line)
    arguments = command_line.parse_args(command_words)

    def command() -> int:
        _ask_whether_allowed(arguments)
        words = archived_matrix.replace_from_option(arguments, command_words)
        invocation = Invocation(arguments)
        words = adapted_matrix.replace_adapt_option(invocation, words)
        remote = on_controller.find_remote_workspace(invocation)
        if remote is not None:
            try:
                return on_controller.run_remotely(remote, invocation, words)
            except ShardlabError as error:
                if (why := on_controller.decide_after_lease(invocation, error)) is None:
                    raise
                invocation.out.print_remark(why, style="yellow")
        on_controller.enter_environment(invocation, words)
        return int(arguments.run(invocation))

    return console.run_command(command, name=f"jobs {arguments.verb}", interrupted=INTERRUPTED)


def _ask_whether_allowed(arguments: argparse.Namespace) -> None:
    """Store the consent of --trust. Raises InputError if the verb acts and the user may not act in this workspace."""
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    waiting_paths = list_waiting_files(workspace) if arguments.verb in START_VERBS else []
    if getattr(arguments, "trust", False):
        retried_runs = workspace.all_runs() if arguments.verb == "retry" else []  # a new attempt may use the last code
        code_paths = (path for run in retried_runs for path in list_code_files(run))
        workspace_trust.store_consent(
            workspace, Output.from_arguments(arguments).print_remark, dict.fromkeys([*waiting_paths, *code_paths])
        )
    if arguments.verb in on_controller.CHANGING_VERBS:
        remote_workspace.read_for_changes(workspace)  # its refusal says more, if this workspace is a copy
    if arguments.verb in ACTIONS:
        only_writes = arguments.verb == "render" or getattr(arguments, "dry_run", False)
        workspace_trust.must_be_allowed(workspace, ACTIONS[arguments.verb], waiting_paths, only_writes=only_writes)


def _plan(invocation: Invocation) -> int:
    planned = planner_verbs.plan_with_options(invocation)
    workspace = invocation.workspace
    data = datasets.find_missing_data(planned.cells, planned.source, workspace)
    hours, shares = plan.estimate_hours(planned, planned.repeats), plan.read_account_shares(planned, workspace)
    scaled, schedule = planner_verbs.scale_out_cells(invocation, planned), planner_verbs.simulate_schedule(invocation, planned)
    late_count = lease_schedule.count_late_runs(planned, workspace)
    views.print_plan(invocation.out, planned, workspace, data, hours, shares, late_count, scaled, schedule)
    return 0


def _render(invocation: Invocation) -> int:
    arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
    planned = planner_verbs.plan_with_options(invocation)
    plan.must_fit_cluster(planned)
    folder = Path(arguments.out).absolute() if arguments.out else workspace.runs
    if arguments.out:
        planned = plan.with_source_in(planned, folder / ".source")
        rendered = plan.render_all(planned, workspace, folder)
    else:
        with workspace.hold_runs_lock():
            rendered = plan.render_all(planned, workspace, folder)
            render.keep_expansion(workspace, planned.source, planned.matrix, planned.all_cells, planned.repeats)
    out.print_line(f"{len(rendered.folders)} run(s) rendered in {folder}; nothing was submitted.")
    for remark in planned.remarks:
        out.print_remark(f"note: {remark}")
    skipped = sending.print_unreadable(out, rendered.skipped)
    out.print_document([{"id": run.run_id, "path": str(run.path)} for run in rendered.folders])
    return int(skipped > 0)


def _submit(invocation: Invocation) -> int:
    arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
    planned = planner_verbs.plan_with_options(invocation)
    plan.must_fit_cluster(planned)
    planned = planner_verbs.keep_fitting_cells(invocation, planned)
    source, options = planned.source, shared_options.read_submit_options(invocation, planned.source)
    on_controller.must_suit_cluster(source.where, workspace)
    _must_have_data(out, workspace, planned.cells, source)
    submit.check_runs(workspace, planned.cells, planned.repeats, source, arguments.resume_from)

    def plan_submission() -> sending.SubmitPlan:
        decisions = submit.decide_runs(workspace, planned.cells, planned.repeats, source, arguments.resume_from)
        return sending.plan_submission(invocation, decisions, source, options, planned)

    if arguments.dry_run:
        return sending.print_dry_run(invocation, plan_submission())
    plan.must_run_here(source, allow_login_node=arguments.here)
    with workspace.hold_runs_lock():
        all_readable = sending.finish_interrupted(invocation, source)
        submit_plan = plan_submission()
        render.keep_expansion(workspace, source, planned.matrix, planned.all_cells, planned.repeats)
        submit_plan = sending.send_runs(invocation, submit_plan)
    return sending.report_sent(invocation, submit_plan, all_readable=all_readable)


def _status(invocation: Invocation) -> int:
    arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace

    def look() -> list[Status]:
        return select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)

    if arguments.watch:
        runs = watch.watch_status(out, workspace, look)
    else:
        views.print_status(out, runs := look(), workspace)
    return int(not sending.tidy_runs(out, workspace, runs))


def _cancel(invocation: Invocation) -> int:
    arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
    if not (arguments.runs or arguments.where or arguments.matrix or arguments.all):
        raise InputError("say what to cancel: run ids, --where, --matrix, or --all.")
    runs = select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)
    cancelled = watch.cancel_runs(workspace, [run for run in runs if run.state not in state.FINAL and not run.is_unreadable])
    leftover_count = sum(run.leftover for run in runs)
    if cancelled or not leftover_count:
        out.print_line(
            f"{len(cancelled)} run(s) cancelled." if cancelled else "nothing to cancel: all selected runs have ended."
        )
    out.print_document({"runs": cancelled})
    tidied = sending.tidy_runs(out, workspace, runs)
    return 0 if tidied and all(run.state in state.FINAL for run in cancelled) else 1


def _retry(invocation: Invocation) -> int:
    args, out, workspace = invocation.arguments, invocation.out, invocation.workspace
    retried_states = {name.strip() for name in args.only.split(",") if name.strip()}
    if not_allowed := sorted(retried_states - MAY_BE_RETRIED):
        raise UnknownName("state in which a run ends", not_allowed[0], MAY_BE_RETRIED, where="--only")
    runs = select_runs(workspace, args.runs, args.matrix, args.where)
    source = render.make_render_context("", invocation.cluster, workspace, wait_gpus_s=shared_options.read_wait_gpus_s(args))
    options = shared_options.read_submit_options(invocation, source)
    retried = [decision.run for decision in submit.decide_retries(workspace, runs, retried_states, source, trust=args.trust)]
    plan.must_run_here(source, allow_login_node=args.here, trains=any(run.traces is None for run in retried) or not retried)
    _must_have_data(out, workspace, [run.cell for run in retried], source)
    with workspace.hold_runs_lock():
        all_readable = sending.finish_interrupted(invocation, source)
        runs = select_runs(workspace, args.runs, args.matrix, args.where)
        all_readable = sending.tidy_runs(out, workspace, runs, of_scheduler=False) and all_readable
        decisions = submit.decide_retries(workspace, runs, retried_states, source, trust=args.trust)
        submit_plan = sending.plan_submission(invocation, decisions, source, options)
        submit.freeze_trusted_plugins(workspace, submit_plan.decisions, trust=args.trust)
        submit_plan = sending.send_runs(invocation, submit_plan)
    return sending.report_sent(invocation, submit_plan, all_readable=all_readable)


def _logs(invocation: Invocation) -> int:
    arguments = invocation.arguments
    return watch.print_logs(invocation.out, invocation.workspace, arguments.run_id, arguments.rank, follow=arguments.follow)


def _must_have_data(out: Output, workspace: Workspace, cells: Sequence[Cell], source: render.RenderContext) -> None:
    """Raises InputError if a data set of these cells is missing; prints a note if it is unknown whether nodes have the data
    sets."""
    data_sets = datasets.find_missing_data(cells, source, workspace)
    if data_sets.unknown:
        out.print_remark(f"note: {data_sets.unknown}")
    datasets.must_have_data(data_sets)


if __name__ == "__main__":
    sys.exit(main())
