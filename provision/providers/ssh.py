"""Provider ssh: the machines that the cluster file lists, which exist already and allow a login by SSH."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from provision import software
from provision.nodes.ssh_node import SshNode
from provision.provider import Provider
from shardlab.cluster.address import Address
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import LOCAL_FOLDER, NodeEntry
from shardlab.remote.remote import Remote
from shardlab.workspace.workspace import Workspace


def list_nodes(cluster: Cluster, workspace: Workspace) -> list[SshNode]:
    """The machines that the cluster file lists. No connection is opened."""
    wheelhouse = cluster.environment.wheelhouse
    return [make_node(cluster, workspace, node, host=node.host or node.name, wheelhouse=wheelhouse) for node in cluster.nodes]


def make_node(
    cluster: Cluster,
    workspace: Workspace,
    entry: NodeEntry,
    *,
    host: str,
    identity_path: Path | None = None,
    user: str | None = None,
    wheelhouse: str | None = None,
    venv_python: str = "python3",
) -> SshNode:
    """A node for an entry of the cluster file.

    host: the name or address for the login. identity_path: the private key for the login; None: the key of the cluster file.
    user: the user who logs in; None: the user of the cluster file. wheelhouse: as for SshNode.
    venv_python: the interpreter that creates the environment. If it is not python3, the environment gets a folder of its own,
    because one shared folder may serve nodes with several releases of Debian.
    """
    ssh_keys = cluster.ssh
    if identity_path is None and ssh_keys.identity is not None:
        identity_path = workspace.resolve_path(ssh_keys.identity)
    ssh_address = Address(
        host=host,
        port=entry.port,
        user=user or entry.user or ssh_keys.user,
        identity=identity_path,
        known_hosts=workspace.shardlab_folder / "known_hosts",
        host_keys=ssh_keys.host_keys,
    )
    log = workspace.shardlab_folder / "log" / f"{entry.name}.log"
    parent_folder = f"{cluster.storage.shared}/shardlab" if cluster.storage.shared else LOCAL_FOLDER
    folder_suffix = "" if venv_python == "python3" else f"-{PurePosixPath(venv_python).parent.parent.name}"
    if cluster.is_in_further_environment:  # two environments may differ only in their wheels
        folder_suffix += f"-{cluster.environment.compute_digest()}"
    packages_digest = software.compute_packages_digest(own_packages=tuple(cluster.environment.packages))
    python_path = f"{parent_folder}/python-{packages_digest}{folder_suffix}/bin/python"
    remote = Remote(ssh_address, may_sudo=ssh_keys.sudo)
    login_fields = (entry.name, host, entry.port, ssh_address.user, identity_path)
    return SshNode(
        *login_fields, python_path, wheelhouse, ssh_keys.sudo, venv_python, entry.address, remote=remote, log_path=log
    )


PROVIDER = Provider("ssh", "its machines already exist", list_nodes)
