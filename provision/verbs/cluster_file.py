"""What the verbs do with the cluster file before they reach a machine: read it, and ask whether it may act."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from provision.provider import Provider
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.terminal.console import Output
from shardlab.verb import Invocation
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace


def read_cluster_file(invocation: Invocation) -> Cluster:
    """The cluster of the file in the command, else of cluster.yaml in the workspace. Raises InputError if both are missing."""
    workspace_file = invocation.workspace.path / "cluster.yaml"
    if invocation.arguments.cluster is None and not workspace_file.exists() and not workspace_file.is_symlink():
        raise InputError(
            f"{workspace_file}: no such file, and the command names no other cluster file. To get one, run: "
            "provision init > cluster.yaml. Or name a cluster file: provision FILE."
        )
    return invocation.cluster


def read_cluster_again(invocation: Invocation) -> Cluster:
    """Read the cluster file again after its machines were created.

    An error is raised as ShardlabError and not as InputError, which would mean that nothing was changed.
    """
    try:
        return read_cluster_file(Invocation(invocation.arguments))
    except InputError as error:
        raise ShardlabError(f"{error} Its machines exist. Correct the cluster file, and run the same command again.") from None


def check_consent(invocation: Invocation) -> None:
    """Store the consent of --trust. Raises InputError if the user may not act with this cluster file in this workspace."""
    file, workspace = invocation.arguments.cluster, invocation.workspace
    named_files = [Path(file)] if file is not None and Path(file).resolve().is_relative_to(workspace.real_path) else []
    if invocation.arguments.trust:
        workspace_trust.store_consent(workspace, invocation.out.print_remark, named_files)
    _show_powers_once(invocation.out, workspace, invocation.cluster if named_files else None)
    workspace_trust.must_be_allowed(workspace, "log in to the nodes and change them", named_files)


def _show_powers_once(output: Output, workspace: Workspace, named_cluster: Cluster | None) -> None:
    """Show what the cluster file makes commands do, if it was there before the workspace began; on a terminal, ask the user.

    named_cluster: as in `workspace_trust.list_unshown_powers`. Raises InputError if the user does not agree.
    """
    unseen_powers = workspace_trust.list_unshown_powers(workspace, named_cluster)
    if not unseen_powers:
        return
    for power_sentence in unseen_powers:
        output.print_remark(f"the cluster file {power_sentence}", style="yellow")
    if sys.stdin.isatty() and output.ask("This file was here before. Type yes if this is what it should do: ") != "yes":
        raise InputError("the cluster file was not allowed. Nothing was changed.")
    workspace_trust.mark_powers_shown(workspace)


def list_locks(provider: Provider[Any], file_cluster: Cluster, workspace: Workspace) -> list[tuple[Path, str]]:
    """The locks of a command that may change nodes, as `lock.hold_locks` needs them."""
    lock_purposes = [(lock_path, f"the cluster {file_cluster.name}") for lock_path in provider.locks(file_cluster)]
    return [*lock_purposes, (workspace.shardlab_folder / "provision.lock", f"the workspace {workspace.path}")]
