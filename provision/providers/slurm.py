"""Provider slurm: a Slurm site that others administer. No machine is set up; jobs use an environment in a shared folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath

from provision.nodes.login_node import LocalLoginNode, LoginNode, make_login_node
from provision.provider import Provider
from provision.site import python as site_python
from provision.site import requests
from shardlab.cluster import container
from shardlab.cluster.address import Address
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_cluster import choose_slurm_cluster
from shardlab.workspace.workspace import Workspace


def list_nodes(cluster: Cluster, workspace: Workspace) -> list[LoginNode] | list[LocalLoginNode]:
    """The nodes of the cluster: only the login node, because Slurm knows the compute nodes."""
    python_path = f"{find_environment_folder(cluster)}/bin/python"
    login = cluster.login
    if login is None:
        slurm_variables = requests.list_cluster_variables(choose_slurm_cluster(cluster))
        return [LocalLoginNode(name="login", python=python_path, variables=slurm_variables)]
    identity_path = workspace.resolve_path(cluster.ssh.identity) if cluster.ssh.identity else None
    ssh_address = Address(
        login.host,
        login.port,
        login.user or cluster.ssh.user,
        identity_path,
        workspace.shardlab_folder / "known_hosts",
        cluster.ssh.host_keys,
        shared=True,
    )
    node = make_login_node(ssh_address, python_path)
    node.variables = requests.list_cluster_variables(cluster.slurm.cluster if cluster.slurm is not None else None)
    return [node]


def find_environment_folder(cluster: Cluster) -> PurePosixPath:
    """The folder of the Python environment. Its name has a digest of all values that decide its packages and its Python."""
    assert cluster.storage.shared is not None
    assert cluster.slurm is not None
    keys = cluster.environment
    digest_values: list[object] = [
        site_python.digest_packages(cluster),
        keys.modules,
        keys.python,
        keys.use,
        cluster.slurm.setup,
    ]
    if keys.container is not None:
        digest_values += [keys.runtime, keys.container, container.list_mounts(cluster), site_python.has_gpus(cluster)]
    if cluster.is_in_further_environment:
        digest_values.append(keys.compute_digest())
    digest_text = json.dumps(digest_values)
    return PurePosixPath(cluster.storage.shared) / f"python-{hashlib.sha256(digest_text.encode()).hexdigest()[:12]}"


PROVIDER = Provider(
    "slurm",
    "the site has its machines",
    list_nodes,
    operations=frozenset({"workspaces", "site-environment", "datasets", "inventory"}),  # these operations need no root
    checks=frozenset({"node_types"}),
)
