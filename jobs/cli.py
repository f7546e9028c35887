"""The command `jobs`: plans, renders, submits and tracks the runs of a matrix."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs import on_controller
from jobs.run_queue import list_code_files, list_waiting_files
from jobs.verb import JobsVerb
from jobs.verbs.advise import AdviseVerb
from jobs.verbs.logs import LogsVerb
from jobs.verbs.menus import LaunchersVerb, MatricesVerb, StrategiesVerb, WorkloadsVerb
from jobs.verbs.plan import PlanVerb
from jobs.verbs.render import RenderVerb
from jobs.verbs.retry import RetryVerb
from jobs.verbs.status import CancelVerb, StatusVerb
from jobs.verbs.submit import SubmitVerb
from jobs.verbs.trace_runs import TraceRunsVerb
from shardlab.errors import ShardlabError
from shardlab.remote import remote_workspace
from shardlab.verb import CommandParser, Invocation, run_command_line
from shardlab.workspace import workspace_trust

INTERRUPTED_MESSAGE = "interrupted; runs that were started continue, and their state is saved."
VERBS: tuple[JobsVerb, ...] = (
    PlanVerb(), RenderVerb(), SubmitVerb(), StatusVerb(), CancelVerb(), RetryVerb(), LogsVerb(), AdviseVerb(), TraceRunsVerb(),
    MatricesVerb(), StrategiesVerb(), WorkloadsVerb(), LaunchersVerb(),
)  # fmt: skip
EPILOG = """example:
  jobs submit --matrix quickstart --wait

`jobs` is also a builtin command of your shell. Each of these lines runs this program instead:
  env jobs status        shardlab jobs status
  eval "$(shardlab shell-init)"     after this line, `jobs status` runs this program too
"""


def parser() -> CommandParser:
    """The parser of the command line of `jobs`, with all verbs."""
    command_parser = CommandParser(
        prog="jobs",
        description="Plan, render, submit and track the runs of a matrix of strategies and GPU counts.",
        epilog=EPILOG,
    )
    command_parser.add_verbs(VERBS)
    return command_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this machine or on the controller of its cluster; return its exit code."""
    return run_command_line(parser(), argv, _carry_out, INTERRUPTED_MESSAGE)


def _carry_out(invocation: Invocation) -> int:
    verb: JobsVerb = invocation.arguments.verb
    _check_permission(invocation, verb)
    verb.prepare(invocation)
    controller_workspace = on_controller.find_remote_workspace(invocation)
    if controller_workspace is not None:
        try:
            return on_controller.run_remotely(controller_workspace, invocation)
        except ShardlabError as error:
            if (lease_remark := on_controller.decide_after_lease(invocation, error)) is None:
                raise
            invocation.out.print_remark(lease_remark, style="yellow")
    on_controller.enter_environment(invocation)
    return verb.run(invocation)


def _check_permission(invocation: Invocation, verb: JobsVerb) -> None:
    """Store the consent of --trust. Raises InputError if the verb acts and the user may not act in this workspace."""
    arguments, workspace = invocation.arguments, invocation.workspace
    waiting_paths = list_waiting_files(workspace) if verb.starts_runs else []
    if getattr(arguments, "trust", False):
        retried_runs = workspace.list_run_dirs() if verb.name == "retry" else []  # a new attempt may use the last code
        code_paths = (code_path for run in retried_runs for code_path in list_code_files(run))
        workspace_trust.store_consent(workspace, invocation.out.print_remark, dict.fromkeys([*waiting_paths, *code_paths]))
    if verb.changes_runs:
        remote_workspace.read_workspace_to_change(workspace)  # its refusal says more, if this workspace is a copy
    if verb.permission:
        only_writes = verb.name == "render" or getattr(arguments, "dry_run", False)
        workspace_trust.must_be_allowed(workspace, verb.permission, waiting_paths, only_writes=only_writes)


if __name__ == "__main__":
    sys.exit(main())
