"""Command-line options that several verbs of `collect` share."""

from __future__ import annotations

from shardlab import completion
from shardlab.console import Parser
from shardlab.workspace import Workspace


def add_matrix(verb: Parser) -> None:
    """Add the option that chooses a matrix of the workspace."""
    matrix_help = "a matrix of this workspace (default: the last matrix)"
    completion.offer(verb.add_argument("--matrix", metavar="NAME", help=matrix_help), Workspace.expansions)


def add_trust(verb: Parser) -> None:
    """Add the option that allows the metrics of a workspace of somebody else."""
    trust_help = "execute the metrics of this workspace although it came from elsewhere (docs/own-models.md); read them first"
    verb.add_argument("--trust", action="store_true", help=trust_help)


def add_baseline(verb: Parser) -> None:
    """Add the option that chooses the strategy to which speed-ups are relative."""
    baseline_help = "compute speed-up relative to this strategy (default: the matrix's baseline)"
    completion.offer(verb.add_argument("--baseline", metavar="STRATEGY", help=baseline_help), completion.strategies)
