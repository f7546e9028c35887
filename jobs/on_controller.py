"""Runs `jobs` commands for a remote cluster on the controller of the cluster, in the workspace on its shared storage."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from socket import gethostname

from jobs.plugins import command_folder
from jobs.plugins.command_folder import CommandFolder
from jobs.rendering.preview import find_cluster_python
from jobs.slurm import commands
from jobs.ssh.step import BETWEEN_NODES_HINT
from jobs.verb import JobsVerb
from shardlab.cluster import cluster, first_node
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, plugin_source
from shardlab.matrix import command, matrix
from shardlab.matrix.matrix import Matrix
from shardlab.remote import remote_workspace, upload
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.url import remove_secrets
from shardlab.verb import Invocation, format_words
from shardlab.workspace import inventory, workspace_trust
from shardlab.workspace.workspace import Workspace


def find_remote_workspace(invocation: Invocation) -> RemoteWorkspace | None:
    """The remote workspace in which the command must run; None if the command runs on this machine.

    Raises InputError, also if this user may not log in for this workspace. `jobs status` then shows the runs that are here.
    """
    target_workspace = _find_target_workspace(invocation)
    if target_workspace is not None:
        try:
            workspace_trust.must_be_allowed(invocation.workspace, f"log in to {target_workspace.host}")
        except InputError as refusal:
            if invocation.arguments.verb.name != "status":
                raise
            invocation.out.print_remark(f"The table shows the runs that were fetched. {refusal}", style="yellow")
            return None
    return target_workspace


def _find_target_workspace(invocation: Invocation) -> RemoteWorkspace | None:
    arguments, workspace = invocation.arguments, invocation.workspace
    verb: JobsVerb = arguments.verb
    if verb.changes_runs:
        return remote_workspace.read_workspace_to_change(workspace)
    if verb.reads_runs:
        return remote_workspace.read_remote_workspace(workspace)
    if verb.name == "plan":
        return _find_rehearsal_workspace(invocation)
    if not verb.makes_runs or getattr(arguments, "out", None) or getattr(arguments, "in_allocation", False):
        return None
    target_cluster = invocation.cluster
    earlier_remote = remote_workspace.read_remote_workspace(workspace)
    if earlier_remote is not None and earlier_remote.cluster != target_cluster.name:
        raise InputError(
            f"{workspace.path}: its runs are on the cluster {earlier_remote.cluster}, not on {target_cluster.name}; "
            "runs of two clusters cannot be compared as one matrix. Use another --workspace for each cluster."
        )
    if target_cluster.provider == "local" or starts_runs_here(target_cluster) or is_preview(invocation):
        return None
    return remote_workspace.find_remote_workspace(workspace, target_cluster)


def is_preview(invocation: Invocation) -> bool:
    """Whether the command only shows scripts of runs that start elsewhere, or in an environment that `provision` has not made.

    It then needs neither an inventory nor a login. After runs were submitted from this workspace, `jobs submit --dry-run` needs
    the login: only the cluster knows which runs it would skip.
    """
    arguments, workspace = invocation.arguments, invocation.workspace
    is_dry_run, is_render = getattr(arguments, "dry_run", False), arguments.verb.name == "render"
    if not (is_dry_run or is_render) or getattr(arguments, "in_allocation", False):
        return False
    target_cluster = invocation.cluster
    if target_cluster.provider == "local":
        return False
    if starts_runs_here(target_cluster):
        needs_inventory = target_cluster.slurm is None or target_cluster.provider == "slurm"
        knows_python = is_in_environment(target_cluster) or find_cluster_python(workspace, target_cluster) is not None
        return needs_inventory and not knows_python
    return is_render or remote_workspace.read_remote_workspace(workspace) is None


def _find_rehearsal_workspace(invocation: Invocation) -> RemoteWorkspace | None:
    """The remote workspace in which `jobs plan --rehearse` must run: this machine has no torch, but the environment that
    `provision` installed on the cluster has it. None if the command runs on this machine."""
    if not invocation.arguments.rehearse or find_spec("torch") is not None:
        return None
    target_cluster = invocation.cluster
    if target_cluster.provider == "local" or starts_runs_here(target_cluster):
        return None
    try:
        return remote_workspace.find_remote_workspace(invocation.workspace, target_cluster)
    except InputError as error:
        invocation.out.print_remark(
            f"torch is not installed here, and the rehearsals cannot run on {target_cluster.name}: {error}"
        )
        return None


def starts_runs_here(target_cluster: Cluster) -> bool:
    """Whether this machine starts the runs of the cluster.

    With Slurm, this machine starts the runs if Slurm's commands on this machine reach the cluster. Without Slurm, it starts
    them if it is the first node of the cluster. If the cluster file lists this machine as a node, Slurm is not asked.
    """
    if target_cluster.slurm is None:
        return first_node.is_on_first_node(target_cluster)
    if not commands.has_slurm_commands():
        return False
    if target_cluster.provider == "slurm":
        return target_cluster.login is None or is_in_environment(target_cluster)
    if gethostname().partition(".")[0] in {node_entry.name for node_entry in target_cluster.nodes}:
        return True
    return commands.read_setting("ClusterName", limit_s=15) == target_cluster.name


def is_in_environment(target_cluster: Cluster) -> bool:
    """Whether this process runs in the Python environment that `provision` installed on the cluster's shared storage. If so,
    this machine belongs to the cluster."""
    return PurePosixPath(os.environ.get(PYTHON_VARIABLE, "")).is_relative_to(target_cluster.storage.shared or "/")


def enter_environment(invocation: Invocation) -> None:
    """On the login node of a Slurm site, restart the command in the Python environment that `provision` installed.

    This process is replaced (execv), because compute nodes may not see the folder of the interpreter that the user started.
    Raises InputError if `provision` has not run.
    """
    verb: JobsVerb = invocation.arguments.verb
    if not (verb.makes_runs or verb.changes_runs) or getattr(invocation.arguments, "out", None):
        return
    target_cluster = invocation.cluster
    if target_cluster.provider != "slurm" or target_cluster.login is not None or is_in_environment(target_cluster):
        return
    if is_preview(invocation):
        return
    _, interpreter = inventory.find_controller(invocation.workspace, target_cluster)
    os.execv(interpreter, [interpreter, "-P", "-m", "jobs", *format_words(invocation.arguments)])


def run_remotely(remote: RemoteWorkspace, invocation: Invocation) -> int:
    """Upload the files that the command reads, then run the command on the controller; return its exit code.

    remote: the remote workspace. Raises ShardlabError.
    """
    arguments, workspace, target_cluster = invocation.arguments, invocation.workspace, invocation.cluster
    verb: JobsVerb = arguments.verb
    remote_arguments = argparse.Namespace(**vars(arguments))
    if verb.name == "trace" and not PurePosixPath(arguments.folder).is_absolute():
        raise InputError(f"{arguments.folder}: lies on {remote.host}. Allowed: an absolute path on that machine.")
    own_matrix_path: Path | None = None
    if verb.makes_runs or verb.name == "plan":
        cluster_file = Path(arguments.cluster) if arguments.cluster else workspace.path / "cluster.yaml"
        cluster_content = (
            files.read(cluster_file, follow_links=True)
            if target_cluster.provider != "cloudlab"
            else cluster.encode_resolved_file(target_cluster)
        )
        # runs need no signatures of URLs
        for archive_url in filter(None, (data_set.archive for data_set in target_cluster.data.list_data_sets())):
            cluster_content = cluster_content.replace(archive_url.encode(), remove_secrets(archive_url).encode())
        content_by_path = {"cluster.yaml": cluster_content}
        for template_path in workspace.list_template_files():
            content_by_path[str(template_path.relative_to(workspace.path))] = files.read(template_path)
        content_by_path |= plugin_source.read_carried_files(workspace.path)
        # Without Slurm, the scheduler on the controller reads the addresses of the nodes from the inventory. If the nodes have
        # a lease, the command on the controller reads the lease from the inventory, to decide which runs are held back. It also
        # reads there which environments exist.
        is_leased = inventory.read_leased_inventory(workspace, target_cluster.name) is not None
        if target_cluster.slurm is None or is_leased or target_cluster.environments:
            content_by_path[str(upload.INVENTORY)] = files.read(inventory.inventory_path(workspace))
        cluster_file = matrix.find_matrix_file(arguments.matrix) if verb.name != "trace" else cluster_file
        if verb.name != "trace" and cluster_file not in matrix.find_shipped_matrices().values():
            own_matrix_path = cluster_file
            loaded_matrix = matrix.load_matrix(cluster_file, arguments.settings)
            content_by_path |= read_matrix_files(cluster_file, loaded_matrix)
            if loaded_matrix.command_by_name:
                from jobs.plugins import send_folder  # not at the top: each start of a command would import tarfile

                command_folders = command_folder.read_folders(loaded_matrix, workspace)
                send_folder.send_folders(remote, command_folders.values())
                if verb.makes_runs:  # an archive of the runs has the files too
                    command_folder.freeze_folders(workspace, list(command_folders.values()))
                content_by_path |= encode_sent_folders(loaded_matrix, command_folders)
            remote_arguments.matrix = f"{remote.workspace}/matrices/{cluster_file.name}"
        invocation.out.print_detail(f"on {remote.host}: {remote.workspace}")
        remote_workspace.upload_files(remote, content_by_path)
        if verb.makes_runs:  # a plan does not decide on which cluster the runs of the workspace are
            remote_workspace.write_remote_workspace(workspace, remote)
            if own_matrix_path is not None:
                remote_workspace.record_matrix_path(workspace, own_matrix_path)
    elif verb.reads_lease and inventory.read_leased_inventory(workspace, remote.cluster) is not None:
        remote_workspace.upload_files(remote, {str(upload.INVENTORY): files.read(inventory.inventory_path(workspace))})
    return remote.run_interactively("jobs", format_words(remote_arguments, omitted_names=("workspace", "cluster")))


def read_matrix_files(matrix_file: Path, loaded_matrix: Matrix) -> dict[str, bytes]:
    """The contents of a matrix file and of the model configurations that it names, by their paths in the remote workspace.

    loaded_matrix: the content of the matrix file, with --set. Raises InputError, which names the files on this machine, not
    their copies.
    """
    model_paths = [model.path for model in loaded_matrix.models.values() if model.path is not None]
    return {f"matrices/{matrix_file.name}": files.read(matrix_file, follow_links=True)} | {
        f"matrices/{model_path}": files.read(matrix_file.parent / model_path) for model_path in model_paths
    }


def encode_sent_folders(loaded_matrix: Matrix, folder_by_command: Mapping[str, CommandFolder]) -> dict[str, bytes]:
    """The file that tells the cluster which frozen copies belong to the commands of a matrix, by its path in the remote
    workspace. folder_by_command: the folder of each command, by the name of the command."""
    sent_folders = [
        command.SentFolder(
            workload.folder, workload.exclude, workload.include, workload.name, name, folder_by_command[name].digest
        )
        for name, workload in loaded_matrix.command_by_name.items()
    ]
    matrix_copy_path = Path("matrices") / Path(loaded_matrix.path).name
    return {str(command.find_sent_folders_path(matrix_copy_path)): files.encode_json(sent_folders)}


def decide_after_lease(invocation: Invocation, connection_error: ShardlabError) -> str | None:
    """Decide what to do if the cluster did not answer: its nodes may have been taken back at the end of their lease.

    connection_error: why the cluster did not answer. Returns None if the lease has not ended; the caller then reports the
    error. If the lease has ended, `jobs status` uses the copies of the runs on this machine, and a remark for the user is
    returned; for every other command, ShardlabError is raised with both reasons.
    """
    leased_inventory = inventory.read_leased_inventory(invocation.workspace)
    if (
        leased_inventory is None
        or leased_inventory.lease is None
        or not leased_inventory.lease.has_ended(current_time := datetime.now(UTC))
    ):
        return None
    lease_remark = f"{str(connection_error).rstrip('.')}; {leased_inventory.lease.describe(current_time)}"
    if invocation.arguments.verb.name != "status":
        raise ShardlabError(lease_remark) from None
    return f"{lease_remark} The table shows the runs that were fetched, as they were then."


def must_suit_workspace(target_cluster: Cluster, workspace: Workspace) -> None:
    """Raises InputError if the nodes of the cluster could not find the runs of this workspace, or if Slurm could not write its
    output into the workspace."""
    if target_cluster.slurm is not None and "\\" in str(workspace.path):
        raise InputError(f"{workspace.path}: Slurm drops backslashes from names of output files. Allowed: no backslashes.")
    if target_cluster.provider == "local":
        return
    shared_folder = target_cluster.storage.shared
    if target_cluster.slurm is None:
        _must_suit_ssh(target_cluster, workspace)
    if shared_folder is not None and not workspace.path.resolve().is_relative_to(Path(shared_folder).resolve()):
        raise InputError(
            f"{workspace.path}: lies outside of {shared_folder}, which the nodes of {target_cluster.name} share; the "
            f"nodes would not find its runs. Allowed: --workspace with a folder in {shared_folder}."
        )


def _must_suit_ssh(target_cluster: Cluster, workspace: Workspace) -> None:
    """Raises InputError if runs cannot be started on the nodes over SSH."""
    if not target_cluster.ssh.between_nodes:
        raise InputError(
            f"the cluster {target_cluster.name}: without Slurm, its nodes start runs over SSH. {BETWEEN_NODES_HINT}."
        )
    inventory.read_inventory(workspace, target_cluster.name)
