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


def nodes(cluster: Cluster, workspace: Workspace) -> list[SshNode]:
    """The machines that the cluster file lists. No connection is opened."""
    wheelhouse = cluster.environment.wheelhouse
    return [make_node(cluster, workspace, node, host=node.host or node.name, wheelhouse=wheelhouse) for node in cluster.nodes]


def make_node(
    cluster: Cluster,
    workspace: Workspace,
    entry: NodeEntry,
    *,
    host: str,
    identity: Path | None = None,
    user: str | None = None,
    wheelhouse: str | None = None,
    venv_python: str = "python3",
) -> SshNode:
    """A node for an entry of the cluster file.

    host: the name or address for the login. identity: the private key for the login; None: the key of the cluster file.
    user: the user who logs in; None: the user of the cluster file. wheelhouse: as for SshNode.
    venv_python: the interpreter that creates the environment. If it is not python3, the environment gets a folder of its own,
    because one shared folder may serve nodes with several releases of Debian.
    """
    ssh = cluster.ssh
    if identity is None and ssh.identity is not None:
        identity = workspace.resolve_path(ssh.identity)
    address = Address(
        host=host,
        port=entry.port,
        user=user or entry.user or ssh.user,
        identity=identity,
        known_hosts=workspace.shardlab_folder / "known_hosts",
        host_keys=ssh.host_keys,
    )
    log = workspace.shardlab_folder / "log" / f"{entry.name}.log"
    folder = f"{cluster.storage.shared}/shardlab" if cluster.storage.shared else LOCAL_FOLDER
    folder_suffix = "" if venv_python == "python3" else f"-{PurePosixPath(venv_python).parent.parent.name}"
    if cluster.is_in_further_environment:  # two environments may differ only in their wheels
        folder_suffix += f"-{cluster.environment.digest()}"
    digest = software.packages_digest(own_packages=tuple(cluster.environment.packages))
    python = f"{folder}/python-{digest}{folder_suffix}/bin/python"
    remote = Remote(address, may_sudo=ssh.sudo)
    login = (entry.name, host, entry.port, address.user, identity)
    return SshNode(*login, python, wheelhouse, ssh.sudo, venv_python, entry.address, remote=remote, log=log)


PROVIDER = Provider("ssh", "its machines already exist", nodes)
