"""The machines of a CloudLab experiment, with the logins and addresses of its manifest."""

from __future__ import annotations

from provision.cloudlab import request
from provision.cloudlab.request import ExperimentRequest
from provision.provider import Provider
from provision.providers import ssh
from provision.providers.ssh import SshNode
from shardlab.cluster import Cluster
from shardlab.console import Output
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


def rspec(cluster: Cluster, workspace: Workspace) -> str:
    """The request of the cluster file as an RSpec. Raises InputError."""
    return request.rspec(_planned(cluster))


def profile(cluster: Cluster, workspace: Workspace) -> str:
    """The request of the cluster file as a profile. Raises InputError."""
    return request.profile(_planned(cluster))


def _planned(cluster: Cluster) -> ExperimentRequest:
    planned = request.plan(cluster)
    for sentence in planned.unknown:
        Output().remark(f"warning: {sentence}.", style="yellow")
    return planned


PROVIDER = Provider(
    "cloudlab",
    "CloudLab lends its machines",
    nodes,
    request=rspec,
    profile=profile,
    own=frozenset({"extra-disks", "experiment_network"}),
)
