"""The parts of a cluster file that describe nodes, logins, storage and data sets.

The keys at the top of the file stand in shardlab/cluster/cluster.py; `slurm`, its partitions and `gpus` in slurm_keys.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from shardlab.record_types import HOST_PATTERN, AbsolutePath, HostName, Sha256, ShortName, limit_text

HOST_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,30}\Z")  # the name of a node that shardlab sets up itself
# A node of an existing Slurm may have any name of a host. The names of nodes that shardlab sets up itself must match HOST_NAME.
NodeName = Annotated[
    str,
    limit_text(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z", "up to 63 letters, digits and the signs . _ -, beginning with a letter or digit"
    ),
]

Role = Literal["controller", "worker"]

IPV4 = r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?!\Z)|\Z)){4}\Z"
Ipv4Address = Annotated[str, limit_text(IPV4, "an IPv4 address, such as 10.10.1.1")]
MacAddress = Annotated[
    str, limit_text(r"^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\Z", "a MAC address in small letters, such as 02:00:5e:10:00:01")
]
DiskPath = Annotated[str, limit_text(r"^/dev/[A-Za-z0-9][A-Za-z0-9._:+/-]*\Z", "the path of a disk, such as /dev/nvme0n1")]

HOST_REGEX = re.compile(HOST_PATTERN)

LOCAL_FOLDER = "/opt/shardlab"  # shardlab's folder on each node, if the nodes share no folder

DataSetName = Literal["cifar10", "mnist", "imagenet"]

# The keys of jobs/planner/links.yaml, which has the bandwidth of each.
LinkName = Literal[
    "nvlink", "nvlink-2", "nvlink-3", "nvlink-4", "nvlink-5", "nvlink-bridge", "infinity-fabric",
    "pcie-3", "pcie-4", "pcie-5", "pcie-3-host", "pcie-4-host", "pcie-5-host",
    "infiniband-edr", "infiniband-hdr", "infiniband-ndr", "infiniband-xdr", "slingshot-11", "efa-100", "efa-200", "efa-400",
    "ethernet-1", "ethernet-10", "ethernet-25", "ethernet-40", "ethernet-100", "ethernet-200", "ethernet-400", "ethernet-800",
]  # fmt: skip


class CardBandwidth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bandwidth of a network card, for a network that no word of `between_nodes` names."""

    gb_per_s: Annotated[float, msgspec.Meta(gt=0)]
    """1e9 bytes/s in one direction: an eighth of the Gbit/s that the data sheet prints."""


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links between GPUs. `jobs plan` and `jobs advise` calculate with them; runs do not use them."""

    link: LinkName | None = None
    """The link between the GPUs of one node; null: the link that the data sheet of the GPU model names."""
    between_nodes: LinkName | CardBandwidth | None = None
    """The link of one network card of a node to other nodes: a word, or `{gb_per_s: NUMBER}`; null: not known, so that no time
    is predicted for runs on several nodes."""
    cards_per_node: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """How many such network cards of a node a run uses at the same time; null: one is assumed."""


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set and its source."""

    name: DataSetName
    """The name of the data set."""
    archive: str | None = None
    """The source: an http(s) URL, or the path of a tar file or of a folder (relative to the workspace unless absolute); null:
    the data set is already in the data path."""
    sha256: Sha256 | None = None
    """The SHA-256 of the archive; required for a URL."""

    @property
    def is_url(self) -> bool:
        """Whether the archive is a URL, so that it must be downloaded."""
        return self.archive is not None and "://" in self.archive


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data sets that `provision` stages, and where."""

    path: str | None = None
    """The folder that contains the data sets; null: `.shardlab/data` in the workspace."""
    sets: list[DataSetName | DataSet] = []
    """The data sets that `provision` stores in `path`: names, or mappings with a name and a source."""
    stage: Literal["node"] | None = None
    """node: when a run starts, it copies its data set to the local disk of each of its nodes ($TMPDIR), and reads this copy.
    null: a run reads from `path`."""

    def list_data_sets(self) -> list[DataSet]:
        """All data sets as `DataSet`, including the data sets that the file lists only by name."""
        return [DataSet(name=entry) if isinstance(entry, str) else entry for entry in self.sets]


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the cluster."""

    name: NodeName
    """The name of the node, which no other node has. If Slurm is installed already (provider ssh), the name that Slurm uses;
    otherwise at most 31 small letters, digits and hyphens."""
    host: str | None = None
    """The address for the login, or a name from ~/.ssh/config. Required for provider ssh, not allowed for provider virtual."""
    address: Ipv4Address | None = None
    """The IPv4 address of the node on the network on which the nodes train, if `host` is on another network (provider ssh);
    Slurm, NFS and the ranks use only this network. null: `host` is on this network."""
    mac: MacAddress | None = None
    """The MAC address of the interface that has `address`; taken from the manifest of the experiment (provider cloudlab)."""
    control: Ipv4Address | None = None
    """The address of the node on the control network, which is for logins only; taken from the manifest of the experiment
    (provider cloudlab)."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """The port of the login by SSH (provider ssh); null: from ~/.ssh/config."""
    user: str | None = None
    """The user of the login by SSH (provider ssh); null: from the key `ssh`, then from ~/.ssh/config."""
    roles: list[Role] = msgspec.field(default_factory=lambda: ["worker"])
    """The roles of the node in Slurm: controller, worker, or both."""


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The login to the nodes. For a key that is null, the settings of ~/.ssh/config are used."""

    user: str | None = None
    """The user for the login to nodes whose entry in `nodes` has no `user`."""
    identity: str | None = None
    """The path of the private key; relative to the workspace unless it is absolute or begins with ~."""
    host_keys: Literal["strict", "accept-new"] = "strict"
    """What happens if the host key of a node is not known. strict: the login is refused. accept-new: the key is stored. A
    host key that changed is always refused."""
    between_nodes: bool = False
    """true: `provision` makes SSH keys with which the user can log in from each node to each other node, for launchers that
    start ranks by SSH."""
    sudo: bool = True
    """false: `provision` runs no command by sudo (provider ssh). It makes the changes that need no root, and prints the
    commands for an administrator."""


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The login node of a Slurm site (provider slurm), if `provision`, `jobs` and `collect` run on another machine."""

    host: HostName
    """The address of the login node, or its name in ~/.ssh/config."""
    user: str | None = None
    """The user of the login; null: from ~/.ssh/config."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """The port of the login; null: from ~/.ssh/config."""


class Lan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network between practice nodes (provider virtual)."""

    subnet: str = "10.88.0.0/24"
    """A private IPv4 network that has an address for each node and an address for this machine."""
    mbps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """The rate of each node's link in Mbit/s; null: no limit."""


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Folders and disks of the nodes."""

    shared: AbsolutePath | None = None
    """The absolute path of a folder that all nodes share. Practice nodes share the folder that has this path on this
    machine."""
    server: ShortName | None = None
    """The node that exports the shared folder to the other nodes by NFS; null: all nodes already have the folder."""
    disk: DiskPath | None = None
    """A whole empty disk that has the same name on every node, on which `provision` creates a file system. A disk that is not
    empty is never changed."""
    mount: AbsolutePath | None = None
    """The folder where the file system of `disk` is mounted."""
