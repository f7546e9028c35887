"""Command-line options that several verbs of `jobs` share, and functions that check and return their values."""

from __future__ import annotations

import argparse

from jobs.planning import plan
from jobs.rendering.render import RenderContext
from jobs.scheduler import SubmitOptions
from shardlab import completion
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.runs import trackers
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace.workspace import Workspace

LONGEST_WAIT_S = 7 * 24 * 3600
MOST_GPUS = 1_000_000  # the most GPUs for which a user may ask a prediction


def add_matrix_options(parser: Parser, *, archives: bool = False) -> None:
    """Add the options that select cells of a matrix. archives: whether the matrix may also come from an archive."""
    matrix_help = "name of a shipped matrix, or path of a matrix file (a path contains / or ends in .yaml)"
    # A group of one option would be printed in parentheses by some releases of Python 3.11.
    option_group = parser.add_mutually_exclusive_group(required=True) if archives else None
    if option_group is None:
        matrix_option = parser.add_argument("--matrix", required=True, metavar="NAME|FILE", help=matrix_help)
    else:
        matrix_option = option_group.add_argument("--matrix", metavar="NAME|FILE", help=matrix_help)
    completion.offer_completions(matrix_option, lambda _: matrix.find_shipped_matrices(), file_endings=(".yaml", ".yml"))
    if option_group is not None:
        from_help = "the matrix of an archive, as `collect archive` writes it"
        option_group.add_argument("--from", dest="archive", metavar="FILE", help=from_help)
    add_cluster_option(parser)
    parser.add_argument("--where", metavar="EXPR", help='only cells for which this expression is true, such as "gpus > 1"')
    set_help = "use this value of a key in place of the one in `defaults` of the matrix; may be given several times"
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    parser.add_argument("--repeats", type=int, metavar="N", help="number of runs of each cell (default: as set in the matrix)")
    scale_help = (
        "tiny: rehearse every cell at a tiny size (its tiny twin), with all ranks on the CPU of one machine (default: full)"
    )
    parser.add_argument("--scale", choices=plan.SCALES, default="full", help=scale_help)
    console.add_trust_option(parser)


def add_cluster_option(parser: Parser) -> None:
    """Add the option --cluster."""
    cluster_help = "cluster file (default: cluster.yaml of the workspace, else this machine)"
    parser.add_argument("--cluster", metavar="FILE", help=cluster_help)


def add_run_selection(parser: Parser) -> None:
    """Add the arguments that select runs of the workspace."""
    runs_help = "ids or their beginnings, short names of cells or runs (docs/how-to/name-a-run.md), or quoted shell patterns"
    completion.offer_completions(parser.add_argument("runs", nargs="*", metavar="RUN", help=runs_help), Workspace.list_run_ids)
    matrix_help = "only runs of this matrix"
    completion.offer_completions(parser.add_argument("--matrix", metavar="NAME", help=matrix_help), Workspace.list_matrix_names)
    where_help = "only runs for which this expression is true, such as \"state == 'failed'\""
    parser.add_argument("--where", metavar="EXPR", help=where_help)


def add_wait_option(parser: Parser) -> None:
    """Add the option --wait."""
    wait_help = "wait until all runs have ended; exit code 1 if a run did not end as expected"
    parser.add_argument("--wait", action="store_true", help=wait_help)


def add_sharing_options(parser: Parser) -> None:
    """Add the options that decide how runs share the machines with each other and with other users."""
    wait_gpus_help = "how long a run waits if other processes use its GPUs, before it fails (default: 0)"
    parser.add_argument("--wait-gpus", type=int, default=0, metavar="SECONDS", help=wait_gpus_help)
    login_node_help = "train on this machine although it is a login node of a Slurm cluster"
    parser.add_argument("--here", action="store_true", help=login_node_help)
    parser.add_argument("--max-parallel", type=int, metavar="N", help="on Slurm: at most N runs at a time")
    pack_help = "on Slurm: one allocation for all runs with the same sbatch options; they run one after another"
    parser.add_argument("--pack", action="store_true", help=pack_help)
    lease_help = "on lent machines: also submit runs that would not end before the lease"
    parser.add_argument("--ignore-lease", action="store_true", help=lease_help)


def read_submit_options(invocation: Invocation, context: RenderContext) -> SubmitOptions:
    """The options with which runs are submitted. Raises InputError if an option for Slurm is given for a cluster without
    Slurm."""
    arguments, run_ids_before = invocation.arguments, getattr(invocation.arguments, "after", None)
    if arguments.max_parallel is not None and not 1 <= arguments.max_parallel <= 100_000:
        raise InputError(f"--max-parallel: found {arguments.max_parallel}. Allowed: 1 to 100000.")
    value_by_option = {"--max-parallel": arguments.max_parallel, "--pack": arguments.pack or None, "--after": run_ids_before}
    given_options = " and ".join(option for option, value in value_by_option.items() if value is not None)
    if given_options and context.scheduler == "allocation":
        raise InputError(
            f"{given_options}: not with --in-allocation, which starts one run at a time. Allowed: leave {given_options} out."
        )
    if given_options and context.scheduler != "slurm":
        raise InputError(
            f"{given_options}: only for Slurm, and the cluster {context.cluster.name} has no `slurm`; its runs start "
            f"in the order of submission. Allowed: leave {given_options} out."
        )
    runs_before = invocation.workspace.match_runs([run_ids_before], context.matrix) if run_ids_before else []
    return SubmitOptions(arguments.max_parallel, arguments.pack, tuple(runs_before), arguments.ignore_lease)


def read_tracker(invocation: Invocation) -> str | None:
    """The value of --track; None if the option is not given, or if the command does not have the option.

    Raises InputError if the tracker is unknown or the nodes of the cluster share no folder, MissingExtra if the package of the
    tracker is not installed.
    """
    tracker_name: str | None = getattr(invocation.arguments, "track", None)
    if tracker_name is None:
        return None
    trackers.check_tracker_name(tracker_name, "--track")
    if invocation.cluster.has_separate_folders:
        raise InputError(
            f"--track: the nodes of the cluster {invocation.cluster.name} share no folder, so no process sees the "
            "records of all ranks while a run goes on. Allowed: leave --track out, and after `collect fetch`: "
            f"collect export --to {tracker_name}"
        )
    trackers.check_tracker_installed(tracker_name, f"jobs submit --track {tracker_name}")
    return tracker_name


def read_wait_gpus_s(arguments: argparse.Namespace) -> int:
    """The value of --wait-gpus in seconds; 0 if the command does not have the option. Raises InputError."""
    wait_s: int = getattr(arguments, "wait_gpus", 0)
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise InputError(f"--wait-gpus: found {wait_s}. Allowed: 0 to {LONGEST_WAIT_S} seconds.")
    return wait_s
