"""Provider local: this machine as a cluster of one node, so that everything can be tried without other machines."""

from __future__ import annotations

from provision.nodes.local_node import LocalNode
from provision.provider import Provider
from shardlab.cluster.cluster import Cluster
from shardlab.workspace.workspace import Workspace


def list_nodes(cluster: Cluster, workspace: Workspace) -> list[LocalNode]:
    """The nodes of a cluster whose provider is local: always this machine alone."""
    environment_folder = cluster.environment.use
    return [LocalNode() if environment_folder is None else LocalNode(python=f"{environment_folder}/bin/python")]


PROVIDER = Provider(
    "local",
    "its only node is this machine",
    list_nodes,
    locks=lambda cluster: [],  # no lock of the cluster, because no machine is changed
    operations=frozenset({"datasets", "inventory"}),  # nothing is installed: this machine is used as it is
    checks=frozenset({"torch", "gpus", "all_reduce", "compile"}),
)
