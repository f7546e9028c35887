"""A cluster as its file says it: where runs happen and where their data lies."""

from __future__ import annotations

import ipaddress
import posixpath
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from shardlab import document, shape
from shardlab.cell import seconds
from shardlab.errors import InputError

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
Role = Literal["controller", "worker"]
# What sbatch reads of a line #SBATCH without quotes, which it has rules of its own for.
SbatchWord = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:,@%+/=&|()*\[\]-]{0,200}$")]
SbatchOption = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{1,40}$")]
# What jobs says itself, or what would take a run out of our hands.
OWN_OPTIONS = {
    "job-name", "output", "error", "array", "nodes", "ntasks", "ntasks-per-node", "time", "partition", "account", "qos",
    "constraint", "gpus-per-node", "gres", "exclusive", "cpus-per-task", "requeue", "no-requeue", "open-mode", "export",
    "wrap", "parsable", "wait", "test-only", "chdir", "exclude", "dependency", "kill-on-invalid-dep", "hold",
}  # fmt: skip
HOST = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$")
REMOTE = (
    "nodes",
    "ssh",
    "lan",
    "gpus",
    "storage",
    "environment",
    "slurm",
)  # what a cluster of this machine alone has no use for

# Never mounted over, nor exported.
SYSTEM_FOLDERS = {
    "bin",
    "boot",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
    "var",
}

SetName = Literal["cifar10", "mnist", "imagenet"]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set and where it comes from.

    archive: an http(s) URL, or a tar file or folder, whose path is relative to the workspace unless absolute; null: the
    set is in the data path already. sha256: the archive's, required for a URL.
    """

    name: SetName
    archive: str | None = None
    sha256: Sha256 | None = None

    @property
    def is_url(self) -> bool:
        return self.archive is not None and "://" in self.archive


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where data sets lie (null: `.shardlab/data` in the workspace) and which of them `provision` stages there."""

    path: str | None = None
    sets: list[SetName | DataSet] = []

    def named(self) -> list[DataSet]:
        """All sets, also those that the file gives as a bare name."""
        return [DataSet(name=one) if isinstance(one, str) else one for one in self.sets]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node as the file has it. host, port, user: how it is reached (provider ssh); roles: what it does in Slurm."""

    name: Name
    host: str | None = None
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    user: str | None = None
    roles: list[Role] = msgspec.field(default_factory=lambda: ["worker"])


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How nodes are logged in to; what is null is left to ~/.ssh/config. host_keys: what to do with one that is not known."""

    user: str | None = None
    identity: str | None = None  # a path; relative to the workspace unless absolute or with ~
    host_keys: Literal["strict", "accept-new"] = "strict"
    between_nodes: bool = False  # whether the user may go from node to node, for launchers that start ranks by ssh


class Lan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network between practice nodes. mbps: the rate of each node's link in Mbit/s, null: as fast as it goes."""

    subnet: str = "10.88.0.0/24"
    mbps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs of each worker. On practice nodes Slurm alone is told of them: they are devices that do nothing."""

    per_node: Annotated[int, msgspec.Meta(ge=0, le=64)]
    type: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,30}$")] | None = None


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """shared: a folder that all nodes have under this absolute path; on practice nodes it is this machine's own.

    server: the node that exports it to the others by NFS; null: it is there already. disk: an empty whole disk of every
    node, which gets a file system that is mounted at `mount`; one that holds anything is never touched.
    """

    shared: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    server: Name | None = None
    disk: Annotated[str, msgspec.Meta(pattern=r"^/dev/[A-Za-z0-9][A-Za-z0-9._:+/-]*$")] | None = None
    mount: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """wheelhouse: a folder of wheels on every node, for nodes without a network; null: pip asks its index.

    Practice nodes have this machine's folder under the same path, read-only.
    """

    wheelhouse: Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slurm as provision installs it (a controller with its accounts on the one node with that role, workers on the others),
    and what jobs ask of it.

    gpu_request: which of sbatch's options asks for GPUs; sites allow one or the other. time: of jobs whose cells have no time
    limit. exclusive: whole nodes, so that no other job disturbs what is measured; else each rank gets cpus_per_rank.
    Its default is 8 for a rank with a GPU, whose threads (autograd, NCCL, data) should not share one processor, else 1.
    requeue: how often a job may be started again after its node failed, it was preempted, or its time was up and it left
    checkpoints. extra: further options of sbatch by their long names, null for one without a value.
    """

    partition: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,30}$")] = "batch"
    account: SbatchWord | None = None
    qos: SbatchWord | None = None
    constraint: SbatchWord | None = None
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    time: str = "01:00:00"
    exclusive: bool = True
    cpus_per_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    requeue: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    extra: dict[SbatchOption, SbatchWord | None] = {}

    @property
    def time_s(self) -> int:
        """Raises ValueError."""
        return seconds(self.time)


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cluster.yaml.

    provider: `local` is this machine, one node, its own processors and GPUs; `ssh` are machines that exist, named under
    nodes; `virtual` are practice nodes, booted on this machine.
    """

    schema: Literal[1]
    name: Name
    provider: Literal["local", "ssh", "virtual"]
    nodes: list[Entry] = []
    ssh: Ssh = msgspec.field(default_factory=Ssh)
    lan: Lan = msgspec.field(default_factory=Lan)
    gpus: Gpus | None = None
    storage: Storage = msgspec.field(default_factory=Storage)
    environment: Environment = msgspec.field(default_factory=Environment)
    slurm: Slurm | None = None
    data: Data = msgspec.field(default_factory=Data)

    def with_role(self, role: Role) -> list[Entry]:
        """The nodes that have a role, in the file's order."""
        return [entry for entry in self.nodes if role in entry.roles]


THIS_MACHINE = Cluster(schema=1, name="local", provider="local")


def load(path: Path) -> Cluster:
    """Read and check a cluster file. Raises InputError with file:line:column for every problem in it."""
    text = document.load(path)
    cluster = shape.convert(text, Cluster)
    if cluster.data.path is not None and not cluster.data.path.strip():
        raise text.error(("data", "path"), "found an empty path. Allowed: a folder, or null.")
    _check_sets(text, cluster.data.named())
    _check_nodes(text, cluster)
    return cluster


def _check_nodes(text: document.Document, cluster: Cluster) -> None:
    if cluster.provider == "local":
        for key in REMOTE:
            if getattr(cluster, key) != getattr(THIS_MACHINE, key):
                raise text.error(
                    (key,), "provider local is this machine alone. Allowed: without this key, or another provider."
                )
        return
    if not cluster.nodes:
        raise text.error(("provider",), f"provider {cluster.provider} without nodes. Allowed: with a list of them under nodes.")
    names = [entry.name for entry in cluster.nodes]
    for place, entry in enumerate(cluster.nodes):
        if entry.name in names[:place]:
            raise text.error(("nodes", place, "name"), f"the name {entry.name} stands twice.")
        if cluster.provider == "ssh" and not (entry.host and HOST.match(entry.host)):
            raise text.error(
                ("nodes", place), f"found the host {entry.host!r}. Allowed: a name of ~/.ssh/config or an address."
            )
        if cluster.provider == "virtual" and (entry.host, entry.port, entry.user) != (None, None, None):
            raise text.error(("nodes", place), "practice nodes get their addresses. Allowed: name and roles.")
    _check_lan(text, cluster)
    _check_storage(text, cluster)
    if cluster.slurm is not None and len(cluster.with_role("controller")) != 1:
        raise text.error(("slurm",), f"{len(cluster.with_role('controller'))} nodes have the role controller. Allowed: one.")
    if cluster.slurm is not None and not cluster.with_role("worker"):
        raise text.error(("slurm",), "no node has the role worker. Allowed: one or more.")
    if cluster.slurm is not None:
        _check_slurm(text, cluster.slurm)


def _check_slurm(text: document.Document, slurm: Slurm) -> None:
    try:
        _ = slurm.time_s
    except ValueError as error:
        raise text.error(("slurm", "time"), str(error)) from None
    for name in slurm.extra:
        if name in OWN_OPTIONS:
            raise text.error(("slurm", "extra", name), f"{name} is decided by each run. Allowed: sbatch's other options.")


def _check_storage(text: document.Document, cluster: Cluster) -> None:
    storage = cluster.storage
    if (storage.disk is None) != (storage.mount is None):
        raise text.error(("storage",), "disk and mount belong together. Allowed: both, or neither.")
    if storage.disk is not None and cluster.provider != "ssh":
        raise text.error(("storage", "disk"), f"provider {cluster.provider} has no disks to give. Allowed: with provider ssh.")
    if storage.server is not None and storage.shared is None:
        raise text.error(("storage", "server"), "a server without a folder. Allowed: with storage.shared.")
    if storage.server is not None and storage.server not in [entry.name for entry in cluster.nodes]:
        raise text.error(("storage", "server"), f"no node is called {storage.server}. Allowed: a name under nodes.")
    made = {"mount": storage.mount, "shared": storage.shared if storage.server else None}
    for key, path in made.items():
        if path is not None and (
            posixpath.normpath(path) != path or path.startswith("//") or path.split("/")[1] in SYSTEM_FOLDERS
        ):
            raise text.error(
                ("storage", key), f"found {path}. Allowed: a plain path outside the system's own folders, such as /mydata."
            )


def _check_lan(text: document.Document, cluster: Cluster) -> None:
    try:
        network = ipaddress.IPv4Network(cluster.lan.subnet)
    except ValueError as error:
        raise text.error(("lan", "subnet"), f"{error}. Allowed: a network such as 10.88.0.0/24.") from None
    if not network.is_private or network.num_addresses < len(cluster.nodes) + 3:
        raise text.error(
            ("lan", "subnet"),
            f"found {network}. Allowed: a private network with an address for each node and one for this machine.",
        )


def _check_sets(text: document.Document, sets: list[DataSet]) -> None:
    for index, one in enumerate(sets):
        place = ("data", "sets", index)
        if one.name in [other.name for other in sets[:index]]:
            raise text.error(place, f"the set {one.name} stands twice.")
        if one.archive is None:
            if one.sha256 is not None:
                raise text.error(
                    (*place, "sha256"), "a checksum without an archive. Allowed: both, an archive alone, or neither."
                )
            continue
        if not one.archive.strip():
            raise text.error((*place, "archive"), "found an empty path. Allowed: a URL, a path, or null.")
        if one.is_url:
            url = urlsplit(one.archive)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise text.error((*place, "archive"), f"found {one.archive!r}. Allowed: http://, https://, or a path.")
            if url.username or url.password:
                raise text.error((*place, "archive"), "a URL with a user or password in it. Allowed: one without secrets.")
            if one.sha256 is None:
                raise text.error(place, "a URL without a checksum. Allowed: one with its sha256 beside it.")


def find(given: Path | None, workspace: Path) -> Cluster:
    """The cluster that a command means: the file given, else the workspace's cluster.yaml, else this machine."""
    if given is not None:
        return load(given)
    own = workspace / "cluster.yaml"
    if own.is_symlink() and not own.exists():
        raise InputError(f"{own}: a link to a file that is not there.")
    return load(own) if own.exists() else THIS_MACHINE
