"""The verbs `jobs status` and `jobs cancel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jobs.status.reconcile import Status
from jobs.status.select import select_runs
from jobs.verb import JobsVerb
from jobs.verbs import sending, shared_options, views, watch
from shardlab.errors import InputError
from shardlab.runs import state
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation


class StatusVerb(JobsVerb):
    """Show the state of runs; cancel queued Slurm jobs whose runs have ended."""

    name = "status"
    example = "jobs status --watch"
    reads_runs = reads_lease = True

    def add_options(self, parser: Parser) -> None:
        shared_options.add_run_selection(parser)
        watch_help = "show a live table until all runs have ended or you press Ctrl-C"
        parser.add_argument("--watch", action="store_true", help=watch_help)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace

        def read_selected_runs() -> list[Status]:
            return select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)

        if arguments.watch:
            statuses = watch.watch_status(out, workspace, read_selected_runs)
        else:
            views.print_status(out, statuses := read_selected_runs(), workspace)
        return int(not sending.tidy_runs(out, workspace, statuses))


def _count_states(statuses: Sequence[Status]) -> str:
    """How many of the runs that were to be cancelled are cancelled, and the states of the others."""
    counts_by_state = Counter(status.state for status in statuses)
    cancelled_count = counts_by_state.pop("cancelled", 0)
    others_text = ", ".join(f"{count} {state}" for state, count in counts_by_state.items())
    return f"{cancelled_count} run(s) cancelled." + (f" Not cancelled: {others_text}." if others_text else "")


class CancelVerb(JobsVerb):
    """Cancel runs that are pending or running."""

    name = "cancel"
    example = "jobs cancel --where \"strategy == 'ddp'\""
    permission = "cancel runs"
    changes_runs = True

    def add_options(self, parser: Parser) -> None:
        shared_options.add_run_selection(parser)
        parser.add_argument("--all", action="store_true", help="cancel every run of the workspace that has not ended")
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        if not (arguments.runs or arguments.where or arguments.matrix or arguments.all):
            raise InputError("say what to cancel: run ids, --where, --matrix, or --all.")
        statuses = select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)
        cancelled = watch.cancel_runs(
            workspace, [run for run in statuses if run.state not in state.FINAL_STATES and not run.is_unreadable]
        )
        leftover_count = sum(run.leftover for run in statuses)
        if cancelled or not leftover_count:
            out.print_line(_count_states(cancelled) if cancelled else "nothing to cancel: all selected runs have ended.")
        out.print_document({"runs": cancelled})
        is_tidy = sending.tidy_runs(out, workspace, statuses)
        return 0 if is_tidy and all(run.state in state.FINAL_STATES for run in cancelled) else 1
