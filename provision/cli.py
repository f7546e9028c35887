"""The command `provision`: inspects or changes the machines of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from provision.command.command_line import ProvisionParser
from provision.verbs.machines import DownVerb, ExtendVerb, HardwareVerb, InitVerb, RequestVerb, WarmVerb
from provision.verbs.nodes import ApplyVerb, FactsVerb, PlanChangesVerb, VerifyVerb
from shardlab.verb import Invocation, Verb, run_command_line

VERBS: tuple[Verb, ...] = (
    ApplyVerb(), PlanChangesVerb(), FactsVerb(), VerifyVerb(), RequestVerb(), HardwareVerb(), WarmVerb(), ExtendVerb(),
    DownVerb(), InitVerb(),
)  # fmt: skip


def parser() -> ProvisionParser:
    """The parser of the command line of `provision`, with all verbs."""
    return ProvisionParser(VERBS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `provision` with the words `argv` (without the program's name). Returns its exit code."""
    return run_command_line(parser(), argv, _carry_out, interrupted_sentence=None)


def _carry_out(invocation: Invocation) -> int:
    # A user who can change the workspace could replace host keys and addresses of nodes.
    for sentence in invocation.workspace.explain_exposed_folders():
        invocation.out.print_remark(f"warning: {sentence}", style="yellow")
    chosen_verb: Verb = invocation.arguments.verb
    return chosen_verb.run(invocation)
