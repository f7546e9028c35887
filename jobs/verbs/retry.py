"""The verb `jobs retry`."""

from __future__ import annotations

from collections import Counter

from jobs.rendering import render
from jobs.status.select import select_runs
from jobs.submission import submit
from jobs.verb import JobsVerb
from jobs.verbs import sending, shared_options
from shardlab.errors import UnknownName
from shardlab.runs import state
from shardlab.runs.run import split_attempt
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation

RETRIED_BY_DEFAULT = "failed,node_fail,preempted,hung"
MAY_BE_RETRIED = (state.FINAL_STATES - {state.IMPORTED}) | {"unknown", submit.HELD}


class RetryVerb(JobsVerb):
    """Submit a new attempt of runs that failed (see --only)."""

    name = "retry"
    example = "jobs retry --only failed,node_fail"
    permission = "start runs"
    starts_runs = changes_runs = reads_lease = True

    def add_options(self, parser: Parser) -> None:
        shared_options.add_run_selection(parser)
        shared_options.add_wait_option(parser)
        shared_options.add_sharing_options(parser)
        only_help = (
            f"retry runs that ended in one of these states (default: {RETRIED_BY_DEFAULT}); held: let runs start that were "
            "held because the installed packages changed or the lease was too short"
        )
        parser.add_list_option(
            "--only", ends_list=_selects_runs, default=RETRIED_BY_DEFAULT, metavar="STATE,...", help=only_help
        )
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        retried_states = {name.strip() for name in arguments.only.split(",") if name.strip()}
        if not_allowed := sorted(retried_states - MAY_BE_RETRIED):
            raise UnknownName("state in which a run ends", not_allowed[0], MAY_BE_RETRIED, place="--only")
        statuses = select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)
        render_context = render.make_render_context(
            "", invocation.cluster, workspace, wait_gpus_s=shared_options.read_wait_gpus_s(arguments)
        )
        submit_options = shared_options.read_submit_options(invocation, render_context)
        retried_runs = [
            decision.run
            for decision in submit.decide_retries(workspace, statuses, retried_states, render_context, trust=arguments.trust)
        ]
        sending.must_have_data(out, workspace, [run.cell for run in retried_runs], render_context)
        all_tidy = True

        def decide() -> list[submit.RunDecision]:
            nonlocal all_tidy
            statuses = select_runs(workspace, arguments.runs, arguments.matrix, arguments.where)
            all_tidy = sending.tidy_runs(out, workspace, statuses, of_scheduler=False)
            decisions = submit.decide_retries(workspace, statuses, retried_states, render_context, trust=arguments.trust)
            decided_runs = {split_attempt(decision.run.run_id)[0] for decision in decisions}
            other_states = Counter(run.state for run in statuses if split_attempt(run.id)[0] not in decided_runs)
            if other_states and (arguments.runs or not decisions):
                counts_text = ", ".join(f"{count} {name}" for name, count in other_states.items())
                out.print_line(f"not retried: {counts_text}. The states that are retried: --only {arguments.only}")
            return decisions

        has_training = any(run.traces is None for run in retried_runs) or not retried_runs
        exit_code = sending.submit_runs(invocation, render_context, submit_options, decide, has_training=has_training)
        return exit_code if all_tidy else max(exit_code, 1)


def _selects_runs(word: str) -> bool:
    return not MAY_BE_RETRIED.issuperset(word.strip(",").split(","))  # else the word is a state after --only
