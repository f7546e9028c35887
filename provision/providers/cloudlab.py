"""The machines of a CloudLab experiment, with the logins and addresses of its manifest."""

from __future__ import annotations

from provision.provider import Provider
from provision.providers import ssh
from provision.providers.ssh import SshNode
from shardlab.cluster import Cluster
from shardlab.errors import InputError
from shardlab.workspace import Workspace


def nodes(cluster: Cluster, workspace: Workspace) -> list[SshNode]:
    """The machines of the experiment; nothing is opened yet. Raises InputError if there is no experiment."""
    if not cluster.nodes:
        raise InputError(
            f"{cluster.name}: there is no experiment yet. Set cloudlab.manifest to the file of its manifest, or run this on a "
            "node of the experiment."
        )
    return ssh.nodes(cluster, workspace)


PROVIDER = Provider("cloudlab", "CloudLab lends its machines", nodes)
