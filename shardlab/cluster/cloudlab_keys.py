"""The key `cloudlab` of a cluster file, and how the nodes of an experiment become the nodes of a cluster."""

from __future__ import annotations

import getpass
import ipaddress
from collections.abc import Sequence
from typing import Annotated

import msgspec

from shardlab.cloudlab.cloudlab_manifest import Experiment, ManifestInterface, ManifestNode
from shardlab.errors import InputError
from shardlab.record_types import PlainWord, limit_text

TOKEN_VARIABLE = "CLOUDLAB_TOKEN"  # the variable with the token of the portal; it is secret, so runs do not get it
EXTRA_DISK = "/mydata"  # the folder at which the local disk of a node is mounted, by a blockstore or by mkextrafs.pl
MOST_NAMED_NODES = 5  # largest number of nodes that a message names
NFS_FOLDERS = ("/proj", "/users")  # CloudLab's folders of projects and users: they are on NFS over the control network

DiskImage = Annotated[
    str,
    limit_text(
        r"^[A-Za-z0-9][A-Za-z0-9_.:+/-]{0,200}\Z", "the name of a disk image, with letters, digits and the signs _ . : + / -"
    ),
]
PortalAddress = Annotated[
    str, limit_text(r"^https://[A-Za-z0-9.-]+(?::\d{1,5})?(?:/[A-Za-z0-9._/-]*)?\Z", "an address that begins with https://")
]


class Cloudlab(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An experiment of CloudLab (provider cloudlab): either it exists and has a manifest, or `provision` creates it."""

    manifest: str | list[str] | None = None
    """The file of the experiment's manifest, relative to the cluster file; a list: one manifest of each aggregate. null: if
    there is a token of the portal, the experiment that `provision` creates; otherwise, on a node of an experiment, the manifest
    that `geni-get manifest` prints."""
    project: PlainWord | None = None
    """The project in which the experiment is created."""
    hardware: PlainWord | None = None
    """The hardware type, such as d8545; `provision hardware` lists the types with GPUs."""
    site: PlainWord | None = None
    """The site (aggregate), such as wisc. The same hardware type may have other GPUs at another site."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """The number of nodes to request."""
    image: DiskImage = "UBUNTU24-64-STD"
    """The disk image; a name without a project means an image of the project emulab-ops."""
    hours: Annotated[int, msgspec.Meta(ge=1, le=24 * 14)] = 16
    """The number of hours for which the nodes are requested; the portal may grant fewer."""
    profile: PlainWord = "small-lan"
    """The profile from which the portal creates the experiment."""
    profile_project: PlainWord = "PortalProfiles"
    """The CloudLab project that contains the profile."""
    bindings: dict[PlainWord, str] = {}
    """Parameters of the profile and their values. With small-lan, only parameters that no other key of `cloudlab` sets."""
    lan_mbps: Annotated[int, msgspec.Meta(ge=1, le=400_000)] | None = None
    """The rate of the experiment network in Mbit/s; null: the best that the nodes have."""
    blockstore_gib: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    """The size in GiB of a local disk at /mydata on each node; 0: all free space; null: no such disk."""
    portal_url: PortalAddress | None = None
    """The address of the portal's API, https only; null: the address of CloudLab's portal."""

    @property
    def manifests(self) -> list[str]:
        """The paths of the manifests in the cluster file, as a list."""
        return [self.manifest] if isinstance(self.manifest, str) else list(self.manifest or [])


class ExperimentNode(msgspec.Struct, frozen=True):
    """A node of an experiment, with the login and the network that the cluster uses."""

    name: str
    """The name of the node, in a form that is allowed in a cluster file."""
    host: str
    port: int
    user: str
    hardware: str | None
    site: str
    control: str | None
    network: ManifestInterface | None
    """Interface on the network that all nodes share; None: a single node without a network."""


def select_nodes(experiment: Experiment, requested_user: str | None, manifest_names: str) -> list[ExperimentNode]:
    """The nodes of an experiment, each with a login and with its interface on the network that all nodes share.

    requested_user: the member of the CloudLab project whose login is used; None: the member whose name is that of this
    machine's user, or else the only member. manifest_names: the names of the manifests for error messages. Raises InputError.
    """
    member_name = _choose_member(experiment, requested_user, manifest_names)
    common_network = _find_common_network(experiment.nodes)
    if common_network is None and len(experiment.nodes) > 1:
        isolated_nodes = [node.name for node in experiment.nodes if not node.interfaces]
        ellipsis = ", ..." if len(isolated_nodes) > MOST_NAMED_NODES else ""
        isolated_text = f" ({', '.join(isolated_nodes[:MOST_NAMED_NODES])}{ellipsis}: on none)" if isolated_nodes else ""
        raise InputError(
            f"{manifest_names}: its nodes share no experiment network{isolated_text}. Allowed: a LAN that all nodes are on."
        )
    node_by_name: dict[str, ExperimentNode] = {}
    node_name_by_address: dict[str, str] = {}  # the name of a node, by its address on the experiment network
    for node in experiment.nodes:
        name = node.name.lower().replace("_", "-")[:31]
        if name in node_by_name:
            raise InputError(f"{manifest_names}: two nodes are called {name}, in lower case. Allowed: different names.")
        host, port = node.login_by_user[member_name]
        interface = next(
            (node_interface for node_interface in node.interfaces if _interface_network(node_interface) == common_network), None
        )
        if interface is not None and (other_node_name := node_name_by_address.setdefault(interface.address, name)) != name:
            raise InputError(
                f"{manifest_names}: {other_node_name} and {name} have the same address {interface.address} on the experiment "
                "network. Allowed: the "
                "manifests of one experiment, in which each node has its own address."
            )
        node_by_name[name] = ExperimentNode(name, host, port, member_name, node.hardware, node.site, node.control, interface)
    return list(node_by_name.values())


def _choose_member(experiment: Experiment, requested_user: str | None, manifest_names: str) -> str:
    members = experiment.find_common_users()
    user_name = requested_user or getpass.getuser()
    if user_name in members:
        return user_name
    if requested_user is None and len(members) == 1:
        return next(iter(members))
    problem = (
        f"the user {user_name} has no login on every node"
        if requested_user
        else f"none of the logins is of the user {user_name} of this machine"
    )
    raise InputError(
        f"{manifest_names}: {problem}. Set in the cluster file ssh.user to one of: {', '.join(sorted(members)) or 'nobody'}."
    )


def _interface_network(interface: ManifestInterface) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"{interface.address}/{interface.prefix_length}", strict=False)


def _find_common_network(nodes: Sequence[ManifestNode]) -> ipaddress.IPv4Network | None:
    """The network to which all nodes are connected, or the first of them on the first node; None if there is none."""
    for interface in nodes[0].interfaces:
        network = _interface_network(interface)
        if all(any(_interface_network(other_interface) == network for other_interface in node.interfaces) for node in nodes):
            return network
    return None
