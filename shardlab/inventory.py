"""Reads the inventory of a cluster's nodes, which `provision` writes, for `jobs` and `collect`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.cluster import Cluster
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import InputError
from shardlab.remote import Address
from shardlab.workspace import Workspace


class Node(msgspec.Struct, frozen=True):
    """A node of inventory.json. The other fields there are for people and other programs.

    host, port, user, identity: for the login by SSH.
    python: the interpreter on the node in which shardlab is installed.
    """

    name: str
    host: str
    roles: list[str] = []
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    python: str | None = None


class Inventory(msgspec.Struct, frozen=True):
    schema: int
    cluster: str
    nodes: list[Node]


def path_of(workspace: Workspace) -> Path:
    return workspace.own / "inventory.json"


def read(workspace: Workspace, cluster: Cluster) -> Inventory:
    """The inventory of this cluster. Raises InputError if `provision` has not written it in this workspace."""
    path = path_of(workspace)
    first = "Run first: provision CLUSTER.yaml"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Inventory)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, so the nodes of the cluster {cluster.name} are not known. {first}.") from None
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: is not an inventory of this version: {error}. {first}.") from None
    if found.cluster != cluster.name:
        raise InputError(f"{path}: describes the cluster {found.cluster}, not {cluster.name}. {first}.")
    return found


def controller(workspace: Workspace, cluster: Cluster) -> tuple[Address, str]:
    """(the address of the controller, the interpreter on it in which shardlab is installed). Raises InputError."""
    found = read(workspace, cluster)
    node = next((one for one in found.nodes if "controller" in one.roles), None)
    if node is None or node.python is None:
        raise InputError(f"{path_of(workspace)}: lists no controller with shardlab. Run again: provision CLUSTER.yaml.")
    address = Address(
        host=node.host,
        port=node.port,
        user=node.user,
        identity=Path(node.identity) if node.identity else None,
        known_hosts=workspace.own / "known_hosts",
        host_keys=cluster.ssh.host_keys,
    )
    return address, node.python
