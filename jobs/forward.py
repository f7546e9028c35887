"""Runs commands about a remote cluster on its controller, in the workspace on the cluster's shared storage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from jobs.slurm import commands
from shardlab import away, cluster, matrix
from shardlab.away import Away
from shardlab.cluster import Cluster
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.workspace import Workspace

SENDS = ("submit", "render")  # these name a matrix, which is uploaded
CHANGES = ("cancel", "retry")
READS = ("status", "logs")


def elsewhere(arguments: argparse.Namespace, workspace: Workspace) -> Away | None:
    """The remote workspace in which the command has to run, or None if it runs here. Raises InputError."""
    if arguments.verb in CHANGES:
        return away.of_this_workspace(workspace)
    if arguments.verb in READS:
        return away.known(workspace)
    if arguments.verb not in SENDS or getattr(arguments, "out", None):
        return None
    where = cluster.find(Path(arguments.cluster) if arguments.cluster else None, workspace.path)
    before = away.known(workspace)
    if before is not None and before.cluster != where.name:
        raise InputError(
            f"{workspace.path}: its runs are on the cluster {before.cluster}, not on {where.name}; runs of two clusters cannot "
            "be compared as one matrix. Use another --workspace for each cluster."
        )
    if where.slurm is None or is_here(where):
        return None
    return away.of(workspace, where)


def is_here(where: Cluster) -> bool:
    """Whether Slurm's commands on this machine reach the cluster. A node of the cluster knows that without the controller."""
    if not commands.here():
        return False
    if gethostname().partition(".")[0] in {entry.name for entry in where.nodes}:
        return True
    return commands.setting("ClusterName", limit_s=15) == where.name


def run(there: Away, arguments: argparse.Namespace, argv: Sequence[str], workspace: Workspace) -> int:
    """Upload the files that the command reads, then run it on the cluster. Raises ShardlabError."""
    words = _without(argv, "--workspace", "--cluster")
    own_matrix: Path | None = None
    if arguments.verb in SENDS:
        texts = {
            "cluster.yaml": (Path(arguments.cluster) if arguments.cluster else workspace.path / "cluster.yaml").read_bytes()
        }
        for path in sorted(workspace.own_templates.rglob("*.j2")):
            texts[str(path.relative_to(workspace.path))] = path.read_bytes()
        file = matrix.find(arguments.matrix)
        if file not in matrix.shipped().values():
            own_matrix = file
            matrix.load(file)  # so that errors name this file, not its copy
            texts[f"matrices/{file.name}"] = file.read_bytes()
            verb, *others = _without(words, "--matrix")
            words = [verb, "--matrix", f"{there.workspace}/matrices/{file.name}", *others]
        Output.of(arguments).detail(f"on {there.host}: {there.workspace}")
        away.deliver(there, texts)
        away.keep(workspace, there)
        if own_matrix is not None:
            away.keep_matrix(workspace, own_matrix)
    return there.hand_over("jobs", words)


def _without(argv: Sequence[str], *names: str) -> list[str]:
    """The words of a command line without these options and their values; what follows `--` are no options."""
    found: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*found, word, *words]
        if word in names:
            next(words, None)
        elif word.partition("=")[0] not in names:
            found.append(word)
    return found


def must_suit(where: Cluster, workspace: Workspace) -> None:
    """Raises InputError if the nodes would not find the runs of this workspace, or Slurm the folders of their output."""
    if where.slurm is not None and "\\" in str(workspace.path):
        raise InputError(f"{workspace.path}: Slurm drops backslashes from names of output files. Allowed: no backslashes.")
    shared = where.storage.shared
    if where.slurm is not None and shared is not None and not workspace.path.resolve().is_relative_to(Path(shared).resolve()):
        raise InputError(
            f"{workspace.path}: lies outside of {shared}, which the nodes of {where.name} share; the nodes would not find its "
            f"runs. Allowed: --workspace with a folder in {shared}."
        )
