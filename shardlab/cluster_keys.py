"""The parts of a cluster file that describe nodes, logins, storage and data sets."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]

Role = Literal["controller", "worker"]

IPV4 = r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?!$)|$)){4}$"

HOST = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$")

LOCAL_FOLDER = "/opt/shardlab"  # ours on each node, without a shared folder

SetName = Literal["cifar10", "mnist", "imagenet"]

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set and its source.

    archive: an http(s) URL, or a path of a tar file or a folder (relative to the workspace unless absolute); null: the data
    set is already in the data path.
    sha256: the SHA-256 of the archive; required for a URL.
    """

    name: SetName
    archive: str | None = None
    sha256: Sha256 | None = None

    @property
    def is_url(self) -> bool:
        """Whether the archive is downloaded."""
        return self.archive is not None and "://" in self.archive


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data sets.

    path: the folder that contains the data sets; null: `.shardlab/data` in the workspace.
    sets: the data sets that `provision` puts there: names, or mappings with a name and a source.
    stage: node: at its start, a run copies its data set to the own disk of each of its nodes ($TMPDIR), and reads this copy;
    null: a run reads from the data path.
    """

    path: str | None = None
    sets: list[SetName | DataSet] = []
    stage: Literal["node"] | None = None

    def named(self) -> list[DataSet]:
        """All data sets as `DataSet`, also those that the file lists only by name."""
        return [DataSet(name=one) if isinstance(one, str) else one for one in self.sets]


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the cluster.

    host: for the login: an address, or a name from ~/.ssh/config; required for provider ssh, not allowed for provider virtual.
    address: the IPv4 address of the node on the network on which the nodes train, if `host` is on another network (provider
    ssh); Slurm, NFS and the ranks use only this network. null: `host` is on it.
    port, user: for the login by SSH (provider ssh); null: `user` is taken from the key ssh, then both from ~/.ssh/config.
    mac, control: of an experiment (provider cloudlab), filled in from its manifest: the MAC address of the interface that has
    `address`, and the node's address on the control network, which is for logins only.
    roles: its roles in Slurm: controller, worker, or both.
    """

    name: Name
    host: str | None = None
    address: Annotated[str, msgspec.Meta(pattern=IPV4)] | None = None
    mac: Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{2}:){5}[0-9a-f]{2}$")] | None = None
    control: Annotated[str, msgspec.Meta(pattern=IPV4)] | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    user: str | None = None
    roles: list[Role] = msgspec.field(default_factory=lambda: ["worker"])


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The login to the nodes. For a key that is null, the settings of ~/.ssh/config are used.

    user: the user on nodes for which the file names no other user.
    identity: the path of the private key; relative to the workspace unless it is absolute or begins with ~.
    host_keys: what happens if the host key of a node is not known: strict refuses the login, accept-new stores the key. A host
    key that changed is always refused.
    between_nodes: whether the user can log in from each node to each other node, for launchers that start ranks by SSH.
    sudo: false: nothing is run by sudo (provider ssh). `provision` does what the user may do, and prints the commands for an
    administrator.
    """

    user: str | None = None
    identity: str | None = None
    host_keys: Literal["strict", "accept-new"] = "strict"
    between_nodes: bool = False
    sudo: bool = True


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The login node of a Slurm site (provider slurm), if `provision`, `jobs` and `collect` run on another machine.

    host: an address, or a name from ~/.ssh/config.
    user, port: null: from ~/.ssh/config.
    """

    host: Annotated[str, msgspec.Meta(pattern=HOST.pattern)]
    user: str | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class Lan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network between practice nodes (provider virtual).

    subnet: a private IPv4 network with an address for each node and one for this machine.
    mbps: the rate of each node's link in Mbit/s; null: no limit.
    """

    subnet: str = "10.88.0.0/24"
    mbps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Folders and disks of the nodes.

    shared: a folder that all nodes share under this absolute path; practice nodes share the folder of this machine.
    server: the node that exports the shared folder to the other nodes by NFS; null: all nodes already have the folder.
    disk: an empty whole disk, which has the same name on every node. It gets a file system; a disk that is not empty is never
    changed.
    mount: the folder where the file system of `disk` is mounted.
    """

    shared: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    server: Name | None = None
    disk: Annotated[str, msgspec.Meta(pattern=r"^/dev/[A-Za-z0-9][A-Za-z0-9._:+/-]*$")] | None = None
    mount: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
