"""Reads the inventory of a cluster's nodes (.shardlab/inventory.json). `provision` writes it; `jobs` and `collect` read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.cluster.address import Address
from shardlab.cluster.all_reduce import MeasuredAllReduce
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.lease import Lease
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import json_file
from shardlab.record_types import Count
from shardlab.workspace.workspace import Workspace

PROVISION_HINT = "Run first: provision CLUSTER.yaml"  # the end of error messages about a missing inventory


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node reported. Further fields in the file are for people and other programs."""

    memory_bytes: Count | None = None
    """Physical memory; None: not known."""


class SiteNodes(msgspec.Struct, frozen=True):
    """Nodes of a Slurm site with the same hardware, as a check of `provision` found them."""

    partition: str
    """The name of their partition."""
    memory_mib: Count
    """The memory that Slurm counts for each node (RealMemory)."""


class InventoryNode(msgspec.Struct, frozen=True):
    """A node in inventory.json. Further fields in the file are for people and other programs."""

    name: str
    """Name in the cluster file."""
    host: str
    """For the login by SSH from other machines."""
    address: str | None = None
    """The address of the node on the network on which the nodes train; other nodes use this address."""
    roles: list[str] = []
    """Controller, worker or both."""
    port: int | None = None
    """For the login by SSH from other machines."""
    user: str | None = None
    """For the login by SSH from other machines."""
    identity: str | None = None
    """The path of the private key."""
    python: str | None = None
    """The path of the interpreter on the node in which shardlab is installed."""
    facts: NodeFacts = NodeFacts()
    """What the node reported."""

    @property
    def address_between_nodes(self) -> str:
        """The address at which other nodes reach this node."""
        return self.address or self.host


class ProvisionedEnvironment(msgspec.Struct, frozen=True):
    """A further Python environment of the nodes (the key `environments` of the cluster file), as `provision` made it."""

    python: str
    """The path of its interpreter, which is the same on all nodes."""
    keys: str
    """The digest of the keys of the cluster file from which it was made."""
    version: str
    """The version of Python."""
    packages: str | None = None
    """The digest of the packages that `provision` installed; None: the user made the environment (provider local)."""
    source: str | None = None
    """The digest of shardlab's source in the environment; None: as for `packages`."""


class Inventory(msgspec.Struct, frozen=True):
    """inventory.json: the nodes of a cluster, as `provision` found them."""

    schema: int
    cluster: str
    """Name of the cluster."""
    nodes: list[InventoryNode]
    """All nodes."""
    lease: Lease | None = None
    """None if the nodes are not lent for a time."""
    all_reduces: tuple[MeasuredAllReduce, ...] = ()
    """The all-reduces that the acceptance checks measured, the newest measurement of each kind."""
    node_types: tuple[SiteNodes, ...] = ()
    """The compute nodes of a Slurm site, which are not in `nodes`."""
    environments: dict[str, ProvisionedEnvironment] = {}
    """The further environments that exist on all nodes, by name."""

    def list_with_role(self, role: str) -> list[InventoryNode]:
        """The nodes that have this role, in the order of the cluster file."""
        return [node for node in self.nodes if role in node.roles]


def inventory_path(workspace: Workspace) -> Path:
    """The path of the inventory in a workspace."""
    return workspace.shardlab_folder / "inventory.json"


def read_inventory(workspace: Workspace, cluster_name: str) -> Inventory:
    """The inventory of the cluster with this name. Raises InputError if `provision` has not written it in this workspace."""
    path = inventory_path(workspace)
    inventory = read_any_inventory(workspace)
    if inventory is None:
        raise InputError(f"{path}: no such file, so the nodes of the cluster {cluster_name} are not known. {PROVISION_HINT}.")
    if inventory.cluster != cluster_name:
        raise InputError(f"{path}: describes the cluster {inventory.cluster}, not {cluster_name}. {PROVISION_HINT}.")
    return inventory


def find_environment(workspace: Workspace, cluster: Cluster, name: str) -> ProvisionedEnvironment:
    """The further environment with this name. Raises InputError if `provision` has not made it as the cluster file says."""
    environment = read_inventory(workspace, cluster.name).environments.get(name)
    if environment is None:
        raise InputError(f"the environment {name} is not ready on the cluster {cluster.name}. {PROVISION_HINT}.")
    if name not in cluster.environments or environment.keys != cluster.environments[name].compute_digest():
        raise InputError(f"the environment {name} changed in the cluster file since `provision` made it. {PROVISION_HINT}.")
    return environment


def read_any_inventory(workspace: Workspace) -> Inventory | None:
    """The inventory in this workspace, of any cluster; None if `provision` has not written it. Raises InputError and
    WorkspaceError."""
    return json_file.read_json(
        inventory_path(workspace), Inventory, f"is not an inventory of this version: {{}}. {PROVISION_HINT}."
    )


def read_leased_inventory(workspace: Workspace, cluster_name: str | None = None) -> Inventory | None:
    """The inventory of this workspace if its nodes are lent for a time (it contains a lease), else None. Raises InputError
    and WorkspaceError.

    cluster_name: the name of the expected cluster; None is returned if the inventory is of another cluster. If `cluster_name`
    is None, the inventory may be of any cluster."""
    inventory = read_any_inventory(workspace)
    if inventory is None or inventory.lease is None or cluster_name not in (None, inventory.cluster):
        return None
    return inventory


def read_lease(workspace: Workspace, cluster_name: str | None = None) -> Lease | None:
    """The lease of the nodes; None if the nodes are not lent, or if the inventory cannot be read (`jobs submit` says why).
    cluster_name: as for `read_leased_inventory`."""
    try:
        inventory = read_leased_inventory(workspace, cluster_name)
    except (InputError, WorkspaceError):
        return None
    return inventory.lease if inventory is not None else None


def read_all_reduces(workspace: Workspace, cluster_name: str) -> tuple[MeasuredAllReduce, ...]:
    """The all-reduces that `provision` measured on the cluster with this name; empty if there are none, or if the inventory
    cannot be read (`jobs submit` says why)."""
    inventory = _read_inventory_if_valid(workspace, cluster_name)
    return () if inventory is None else inventory.all_reduces


def read_node_bytes(workspace: Workspace, cluster: Cluster) -> int | None:
    """The smallest memory of a node on which the ranks of a run may start, in bytes; None if it is not known."""
    if cluster.provider == "local":
        import psutil

        return int(psutil.virtual_memory().total)
    inventory = _read_inventory_if_valid(workspace, cluster.name)
    if inventory is None:
        return None
    if cluster.provider == "slurm":
        cluster_partition = None if cluster.slurm is None else cluster.slurm.partition
        node_bytes = [
            node_type.memory_mib << 20
            for node_type in inventory.node_types
            if cluster_partition is None or node_type.partition in cluster_partition.split(",")
        ]
    else:
        node_bytes = [node.facts.memory_bytes or 0 for node in inventory.list_with_role("worker") or inventory.nodes]
    return min(node_bytes, default=0) or None


def _read_inventory_if_valid(workspace: Workspace, cluster_name: str) -> Inventory | None:
    """The inventory of the cluster with this name; None if there is none, or if it cannot be read."""
    try:
        inventory = read_any_inventory(workspace)
    except (InputError, WorkspaceError):
        return None
    return inventory if inventory is not None and inventory.cluster == cluster_name else None


def find_controller(workspace: Workspace, cluster: Cluster) -> tuple[Address, str]:
    """How to use the controller of a cluster. Returns (the address for the login, the path of the Python on the controller in
    which shardlab is installed).

    In a cluster without Slurm, if no node has the role controller, the first node is used. Raises InputError.
    """
    inventory = read_inventory(workspace, cluster.name)
    nodes = inventory.list_with_role("controller") or (inventory.nodes if cluster.slurm is None else [])
    node = next(iter(nodes), None)
    if node is None or node.python is None:
        raise InputError(f"{inventory_path(workspace)}: lists no controller with shardlab. Run again: provision CLUSTER.yaml.")
    ssh_address = Address(
        host=node.host,
        port=node.port,
        user=node.user,
        identity=Path(node.identity) if node.identity else None,
        known_hosts=workspace.shardlab_folder / "known_hosts",
        host_keys=cluster.ssh.host_keys,
        shared=cluster.login is not None,
    )
    return ssh_address, node.python
