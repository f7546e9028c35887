"""Reads a cluster file, which describes the machines on which runs train, their software, and where data sets are stored.

The keys inside of `slurm`, `environment`, `cloudlab` and the others stand in the files that end in `_keys.py` beside this one.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from shardlab.cloudlab import cloudlab_experiment, cloudlab_manifest
from shardlab.cluster import cloudlab_keys, environment_keys, slurm_keys
from shardlab.cluster.cloudlab_keys import Cloudlab
from shardlab.cluster.cluster_keys import (
    HOST_NAME,
    HOST_REGEX,
    LOCAL_FOLDER,
    Data,
    DataSet,
    Lan,
    Login,
    Network,
    NodeEntry,
    Role,
    Ssh,
    Storage,
)
from shardlab.cluster.environment_keys import Environment
from shardlab.cluster.slurm_keys import Gpus, Slurm
from shardlab.errors import InputError
from shardlab.files import document, validation
from shardlab.matrix.cell import EnvironmentName
from shardlab.record_types import ShortName
from shardlab.url import remove_secrets

DebianRelease = Literal["bookworm", "trixie", "sid"]  # releases of Debian
MOUNTABLE_PATH = re.compile(r"^[A-Za-z0-9._/+-]*\Z")  # a path that can be mounted in a container; : and , separate mounts
# Keys of a cluster file that are not allowed with provider local.
REMOTE_KEYS = ("login", "cloudlab", "nodes", "ssh", "lan", "release", "gpus", "storage", "environment", "slurm")


# System folders in `/`. `provision` neither mounts a disk over these folders nor exports them by NFS.
SYSTEM_FOLDERS = set("bin boot dev etc lib lib32 lib64 proc root run sbin sys tmp usr var".split())  # noqa: SIM905


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of cluster.yaml."""

    schema: Literal[1]
    """The version of the format."""
    name: ShortName
    """The name of the cluster, which reports and names of files contain."""
    provider: Literal["local", "ssh", "virtual", "slurm", "cloudlab"]
    """Where the machines come from. local: this machine is the only node. ssh: existing machines, listed under `nodes`.
    virtual: practice nodes, which are booted on this machine. slurm: a managed Slurm site, where nothing needs root. cloudlab:
    the nodes of a CloudLab experiment."""
    login: Login | None = None
    """The login node of the site (provider slurm); null: this machine is the login node."""
    cloudlab: Cloudlab | None = None
    """The CloudLab experiment (provider cloudlab)."""
    nodes: list[NodeEntry] = []
    """The nodes of the cluster. With provider cloudlab, they are taken from the manifest of the experiment."""
    ssh: Ssh = msgspec.field(default_factory=Ssh)
    """How to log in to the nodes by SSH."""
    lan: Lan = msgspec.field(default_factory=Lan)
    """The network between practice nodes (provider virtual)."""
    release: DebianRelease | None = None
    """The release of Debian on practice nodes (provider virtual), which determines the versions of Slurm and systemd; null: the
    release of this machine."""
    gpus: Gpus | None = None
    """The GPUs of each worker; null: with provider local, the GPUs that are found on this machine; otherwise no GPUs."""
    storage: Storage = msgspec.field(default_factory=Storage)
    """Folders and disks of the nodes."""
    environment: Environment = msgspec.field(default_factory=Environment)
    """The Python environment of the nodes."""
    environments: dict[EnvironmentName, Environment] = {}
    """Further Python environments by name, with the same keys, of which no key is taken from `environment`. Cells name the
    environment in which they train with the key `environment`. With provider local, only `use` is allowed."""
    slurm: Slurm | None = None
    """Slurm and the options with which jobs are submitted; null: the cluster has no Slurm, and runs on its nodes are started
    over SSH."""
    data: Data = msgspec.field(default_factory=Data)
    """The data sets."""
    network: Network = msgspec.field(default_factory=Network)
    """The links between GPUs, from which `jobs plan` predicts times."""
    price_per_gpu_hour: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The price of a GPU for an hour, in any currency, from which `jobs plan` computes costs; null: not known."""

    def list_with_role(self, role: Role) -> list[NodeEntry]:
        """The nodes that have this role, in the order of the cluster file."""
        return [entry for entry in self.nodes if role in entry.roles]

    @property
    def controller(self) -> NodeEntry | None:
        """The node on which commands about runs are executed: the first node with the role controller, else the first node."""
        return next(iter(self.list_with_role("controller") or self.nodes), None)

    @property
    def workspaces(self) -> PurePosixPath:
        """The folder on the nodes that contains their workspaces.

        It is on the shared storage. If the nodes share no storage, it has the same path on each node's own disk.
        """
        return PurePosixPath(self.storage.shared or self.storage.mount or LOCAL_FOLDER) / "workspaces"

    @property
    def has_separate_folders(self) -> bool:
        """Whether runs are started over SSH on nodes that share no folder."""
        return self.provider in ("ssh", "virtual", "cloudlab") and self.slurm is None and self.storage.shared is None

    @property
    def gpu_types(self) -> list[str]:
        """The GPU types that a cell may name: the types of the partitions, or the type in `gpus` if there are no partitions."""
        if self.slurm is not None and self.slurm.partitions:
            return [partition.gpus.type for partition in self.slurm.partitions if partition.gpus.type is not None]
        return [self.gpus.type] if self.gpus is not None and self.gpus.type is not None else []

    def select_gpu_type(self, gpu_type: str | None) -> Cluster:
        """A copy of this cluster in which `slurm` and `gpus` describe the partition with this GPU type.

        gpu_type: the value in a cell: None, or one of `gpu_types`. If it is None, or if no partition has this GPU type, the
        cluster is returned unchanged.
        """
        if self.slurm is None or gpu_type is None:
            return self
        for partition in self.slurm.partitions:
            if partition.gpus.type == gpu_type:
                partition_limits = {"max_time": partition.max_time, "max_nodes": partition.max_nodes}
                partition_slurm = msgspec.structs.replace(self.slurm, partition=partition.name, **partition_limits)
                return msgspec.structs.replace(self, gpus=partition.gpus, slurm=partition_slurm)
        return self

    def for_environment(self, name: str | None) -> Cluster:
        """A copy of this cluster in which `environment` is the environment with this name.

        name: the value in a cell: None, or one of `environments`. If it is None or unknown, the cluster is returned unchanged.
        """
        return self if name not in self.environments else msgspec.structs.replace(self, environment=self.environments[name])

    @property
    def is_in_further_environment(self) -> bool:
        """Whether `environment` is one of `environments`, which `for_environment` chose. Objects are compared and not keys: the
        default stays the default if a further environment has equal keys."""
        return any(self.environment is other_environment for other_environment in self.environments.values())

    def map_environments(self) -> dict[document.KeyPath, Environment]:
        """All environments, each with its place in the cluster file; the default environment comes first."""
        environments: dict[document.KeyPath, Environment] = {("environment",): self.environment}
        return environments | {("environments", name): environment for name, environment in self.environments.items()}


INIT_HINT = "To get a cluster file, run: provision init > cluster.yaml"
THIS_MACHINE = Cluster(schema=1, name="local", provider="local")


def load_cluster(path: Path, created_manifests: Sequence[Path] = ()) -> Cluster:
    """Read and check a cluster file. Raises InputError with file:line:column for a problem in the file.

    created_manifests: the paths of the manifests of the CloudLab experiment that `provision` created. They are used if the
    cluster file has provider cloudlab and lists neither nodes nor manifests."""
    if not path.exists() and not path.is_symlink():
        raise InputError(f"{path}: no such file. {INIT_HINT}")
    cluster_document = document.load_document(path)
    if cluster_document.data is None:
        raise InputError(f"{path}: the file has no keys. {INIT_HINT}")
    cluster = validation.convert_document(cluster_document, Cluster)
    if cluster.data.path is not None and not cluster.data.path.strip():
        raise cluster_document.error(("data", "path"), "found an empty path. Allowed: the path of a folder, or null.")
    _check_data_sets(cluster_document, cluster.data.list_data_sets())
    if cluster.cloudlab is not None and cluster.cloudlab.manifests:
        manifest_paths = [(path.parent / manifest_name).absolute() for manifest_name in cluster.cloudlab.manifests]
        # The paths become absolute, because `provision` later reads the lease from the manifests and does not know the folder
        # of the cluster file.
        experiment = msgspec.structs.replace(cluster.cloudlab, manifest=[str(manifest) for manifest in manifest_paths])
        cluster = msgspec.structs.replace(cluster, cloudlab=experiment)
        if not cluster.nodes:
            cluster = add_experiment_nodes(cluster, manifest_paths)
    elif cluster.provider == "cloudlab" and cluster.cloudlab is not None and not cluster.nodes and created_manifests:
        cluster = add_experiment_nodes(cluster, created_manifests)
    _check_nodes(cluster_document, cluster)
    return cluster


def add_experiment_nodes(cluster: Cluster, manifest_paths: Sequence[Path]) -> Cluster:
    """The cluster with the nodes of a CloudLab experiment. The first node is also the controller. Raises InputError.

    manifest_paths: the paths of the manifests of the experiment.
    """
    return add_manifest_nodes(cluster, [(str(path), cloudlab_manifest.read_manifest(path)) for path in manifest_paths])


def add_manifest_nodes(cluster: Cluster, named_manifests: Sequence[tuple[str, bytes]]) -> Cluster:
    """The cluster with the nodes of a CloudLab experiment. `add_experiment_nodes` calls it with the manifests that it has read.

    named_manifests: for each manifest, (its name for error messages, its content).
    """
    manifest_names = ", ".join(name for name, _ in named_manifests)
    experiment = cloudlab_manifest.parse_manifests(named_manifests)
    nodes = [
        NodeEntry(
            name=node.name,
            host=node.host,
            address=node.network.address if node.network is not None else node.control,
            mac=node.network.mac if node.network is not None else None,
            control=node.control,
            port=node.port,
            user=node.user,
            roles=["worker"] if index else ["controller", "worker"],
        )
        for index, node in enumerate(cloudlab_keys.select_nodes(experiment, cluster.ssh.user, manifest_names))
    ]
    return msgspec.structs.replace(cluster, nodes=nodes)


def encode_resolved_file(cluster: Cluster) -> bytes:
    """The content of a cluster file that lists all nodes, also the nodes that were read from the manifests of an experiment.

    A machine that does not have the manifests can read this file. The content is JSON, which is valid YAML.
    """
    cloudlab_section = None if cluster.cloudlab is None else msgspec.structs.replace(cluster.cloudlab, manifest=None)
    cluster_json = msgspec.json.encode(msgspec.structs.replace(cluster, cloudlab=cloudlab_section))
    return msgspec.json.format(cluster_json, indent=2) + b"\n"


def _check_nodes(doc: document.Document, cluster: Cluster) -> None:
    if cluster.provider == "local":
        for key in REMOTE_KEYS:
            if getattr(cluster, key) != getattr(THIS_MACHINE, key):
                raise doc.error(
                    (key,), "not allowed with provider local, which uses only this machine. Remove it, or change the provider."
                )
        for name, environment in cluster.environments.items():
            environment_keys.check_local_environment(doc, environment, ("environments", name))
        return
    if cluster.provider == "slurm":
        _check_slurm_site(doc, cluster)
        return
    if cluster.provider == "cloudlab" and cluster.cloudlab is None:
        raise doc.error(
            ("provider",), "provider cloudlab needs the key cloudlab. Allowed: a mapping such as `cloudlab: {manifest: FILE}`."
        )
    if cluster.provider != "cloudlab" and cluster.cloudlab is not None:
        raise doc.error(("cloudlab",), f"not allowed with provider {cluster.provider}. Allowed: only with provider cloudlab.")
    _check_installed_nodes(doc, cluster)


def _check_slurm_site(doc: document.Document, cluster: Cluster) -> None:
    """Check the cluster file of a managed Slurm site, where Slurm knows the nodes and nothing is installed on them."""
    for key in ("nodes", "lan", "release"):
        if getattr(cluster, key) != getattr(THIS_MACHINE, key):
            raise doc.error((key,), "not allowed with provider slurm, because Slurm itself knows the nodes. Remove it.")
    for key in ("server", "disk", "mount"):
        if getattr(cluster.storage, key) is not None:
            raise doc.error(("storage", key), "not allowed with provider slurm, which changes no machine. Allowed: shared.")
    if cluster.ssh.between_nodes:
        raise doc.error(("ssh", "between_nodes"), "not allowed with provider slurm, which starts ranks by Slurm. Remove it.")
    if cluster.slurm is None:
        raise doc.error(
            ("provider",), "provider slurm needs the key slurm. Allowed: a mapping such as `slurm: {partition: gpu}`."
        )
    if cluster.storage.shared is None:
        raise doc.error(
            ("provider",),
            "provider slurm needs storage.shared. Allowed: a folder of yours that the login node and all nodes share.",
        )
    for key_path, environment in cluster.map_environments().items():
        environment_keys.check_site(doc, environment, key_path)
    container_images = [environment.container for environment in cluster.map_environments().values() if environment.container]
    if container_images and not MOUNTABLE_PATH.match(cluster.data.path or ""):
        raise doc.error(
            ("data", "path"),
            f"found {cluster.data.path}. Allowed with a container, which mounts it: letters, digits and the signs . _ / + -",
        )
    if not cluster.ssh.sudo:
        raise doc.error(("ssh", "sudo"), "not allowed with provider slurm, which never uses sudo. Remove it.")
    slurm_keys.check_slurm(doc, cluster.slurm)


def _check_installed_nodes(text: document.Document, cluster: Cluster) -> None:
    """Check the cluster file of nodes that `provision` sets up: all providers except local and slurm."""
    if cluster.login is not None:
        raise text.error(("login",), f"not allowed with provider {cluster.provider}. Allowed: only with provider slurm.")
    for key_path, environment in cluster.map_environments().items():
        environment_keys.check_installed_environment(text, environment, cluster.provider, key_path)
    for key in ("release", "lan"):
        if cluster.provider != "virtual" and getattr(cluster, key) != getattr(THIS_MACHINE, key):
            raise text.error((key,), f"not allowed with provider {cluster.provider}, whose machines already exist. Remove it.")
    if cluster.provider == "cloudlab":
        _check_nfs_folders(text, cluster)
    if not cluster.nodes and cluster.provider == "cloudlab":
        return  # the experiment does not exist yet, so its nodes are not known
    if not cluster.nodes:
        raise text.error(("provider",), f"provider {cluster.provider} needs nodes. Allowed: one or more, in the list nodes.")
    node_names = [entry.name for entry in cluster.nodes]
    for index, entry in enumerate(cluster.nodes):
        if entry.name in node_names[:index]:
            raise text.error(("nodes", index, "name"), f"the name {entry.name} is used twice. Allowed: each name once.")
        if cluster.provider != "ssh" and not HOST_NAME.match(entry.name):
            raise text.error(
                ("nodes", index, "name"), f"found {entry.name!r}. Allowed: at most 31 small letters, digits and hyphens."
            )
        if cluster.provider in ("ssh", "cloudlab") and not (entry.host and HOST_REGEX.match(entry.host)):
            allowed_hosts = "Allowed: an address, or a name from ~/.ssh/config."
            raise text.error(("nodes", index), f"found the host {entry.host!r}. {allowed_hosts}")
        if cluster.provider != "cloudlab" and (entry.mac, entry.control) != (None, None):
            raise text.error(
                ("nodes", index), f"mac and control are not allowed with provider {cluster.provider}. Remove them."
            )
        if cluster.provider == "virtual" and (entry.host, entry.address, entry.port, entry.user) != (None, None, None, None):
            raise text.error(("nodes", index), "practice nodes get their addresses from lan.subnet. Allowed: name and roles.")
    if cluster.provider == "virtual":
        _check_practice(text, cluster)
    if not cluster.ssh.sudo:
        _check_without_root(text, cluster)
    _check_storage(text, cluster)
    if cluster.slurm is not None and len(cluster.list_with_role("controller")) != 1:
        raise text.error(("slurm",), f"{len(cluster.list_with_role('controller'))} nodes have the role controller. Allowed: 1.")
    if cluster.slurm is not None and not cluster.list_with_role("worker"):
        raise text.error(("slurm",), "no node has the role worker. Allowed: one node or more with this role.")
    if cluster.slurm is not None:
        slurm_keys.check_installed_slurm(text, cluster.slurm, cluster.provider)


def _check_nfs_folders(cluster_document: document.Document, cluster: Cluster) -> None:
    """Check that no folder in the cluster file is on CloudLab's NFS servers. Raises InputError with file:line:column.

    The NFS servers are reached over the control network, and CloudLab allows only logins on this network.
    """
    folder_by_key: dict[document.KeyPath, str | None] = {
        ("storage", "shared"): cluster.storage.shared,
        ("storage", "mount"): cluster.storage.mount,
        ("data", "path"): cluster.data.path,
        **{(*path, "wheelhouse"): environment.wheelhouse for path, environment in cluster.map_environments().items()},
    }
    for key, path in folder_by_key.items():
        if path is not None and (path.startswith("~") or _find_top_folder(path) in cloudlab_keys.NFS_FOLDERS):
            raise cluster_document.error(
                key,
                f"found {path}. On CloudLab, {' and '.join(cloudlab_keys.NFS_FOLDERS)}, where home folders are, are NFS over "
                "the control network, which is only for logins. Allowed: a folder on a disk of the nodes, such as "
                f"{cloudlab_keys.EXTRA_DISK}/shardlab.",
            )


def _find_top_folder(path: str) -> str:
    """The first folder of an absolute path, such as `/proj` for `/proj/a/b`; empty for a relative path."""
    return "/" + posixpath.normpath(path).lstrip("/").partition("/")[0] if path.startswith("/") else ""


def _check_without_root(doc: document.Document, cluster: Cluster) -> None:
    if cluster.provider != "ssh":
        raise doc.error(("ssh", "sudo"), f"not allowed with provider {cluster.provider}. Allowed: only with provider ssh.")
    if cluster.storage.shared is None:
        raise doc.error(
            ("ssh", "sudo"), "false needs storage.shared. Allowed: a folder that all nodes share, and which the user may write."
        )
    if cluster.storage.disk is not None:
        raise doc.error(
            ("storage", "disk"),
            "not allowed with ssh.sudo: false, because only root can see whether a disk is empty. Allowed: an administrator "
            "mounts the disk, and storage.shared names a folder on it.",
        )


def _check_storage(doc: document.Document, cluster: Cluster) -> None:
    storage_keys = cluster.storage
    if (storage_keys.disk is None) != (storage_keys.mount is None):
        raise doc.error(("storage",), "disk and mount belong together. Allowed: both, or neither.")
    if storage_keys.disk is not None and cluster.provider not in ("ssh", "cloudlab"):
        raise doc.error(("storage", "disk"), f"provider {cluster.provider} has no disks. Allowed: with ssh and cloudlab.")
    if storage_keys.server is not None and storage_keys.shared is None:
        raise doc.error(("storage", "server"), "a server without a folder to export. Allowed: together with storage.shared.")
    if storage_keys.server is not None and storage_keys.server not in [entry.name for entry in cluster.nodes]:
        raise doc.error(("storage", "server"), f"no node is called {storage_keys.server}. Allowed: a name under nodes.")
    folder_by_key = {"mount": storage_keys.mount, "shared": storage_keys.shared if storage_keys.server else None}
    for key, path in folder_by_key.items():
        if path is not None and (
            posixpath.normpath(path) != path or path.startswith("//") or path.split("/")[1] in SYSTEM_FOLDERS
        ):
            raise doc.error(
                ("storage", key),
                f"found {path}. Allowed: a path outside the system's folders, without `..` or a final slash, such as /mydata.",
            )


def _check_practice(doc: document.Document, cluster: Cluster) -> None:
    for environment_name, environment in cluster.environments.items():
        if environment.wheelhouse is not None:
            raise doc.error(
                ("environments", environment_name, "wheelhouse"),
                "not allowed with provider virtual, whose nodes have the wheels of environment.wheelhouse. Remove it.",
            )
    for key in ("user", "identity"):
        if getattr(cluster.ssh, key) is not None:
            raise doc.error(("ssh", key), "not allowed with provider virtual, which makes the user and the key. Remove it.")
    try:
        lan_network = ipaddress.IPv4Network(cluster.lan.subnet)
    except ValueError as error:
        raise doc.error(("lan", "subnet"), f"{error}. Allowed: a network such as 10.88.0.0/24.") from None
    if not lan_network.is_private or lan_network.num_addresses < len(cluster.nodes) + 3:
        raise doc.error(
            ("lan", "subnet"),
            f"found {lan_network}. Allowed: a private network with an address for each node and one for this machine.",
        )


def _check_data_sets(doc: document.Document, data_sets: list[DataSet]) -> None:
    for index, data_set in enumerate(data_sets):
        path = ("data", "sets", index)
        if data_set.name in [other_data_set.name for other_data_set in data_sets[:index]]:
            raise doc.error(path, f"the data set {data_set.name} is listed twice. Allowed: each data set once.")
        if data_set.archive is None:
            if data_set.sha256 is not None:
                raise doc.error(
                    (*path, "sha256"), "a checksum without an archive. Allowed: both, an archive alone, or neither."
                )
            continue
        if not data_set.archive.strip():
            raise doc.error((*path, "archive"), "found an empty path. Allowed: a URL, a path, or null.")
        if data_set.is_url:
            archive_url = urlsplit(data_set.archive)
            if archive_url.scheme not in ("http", "https") or not archive_url.hostname:
                shown_address = remove_secrets(data_set.archive.partition("?")[0])
                raise doc.error((*path, "archive"), f"found {shown_address!r}. Allowed: http://, https://, or a path.")
            if not re.fullmatch(r"[!#-&(-;=?-~]+", data_set.archive):
                raise doc.error((*path, "archive"), "found a space or a quote in a URL. Allowed: %20, %22 and %27 for these.")
            if archive_url.username or archive_url.password:
                raise doc.error((*path, "archive"), "a URL with a user or password in it. Allowed: a URL without them.")
            if data_set.sha256 is None:
                raise doc.error(path, "a URL without a checksum. Allowed: a URL together with the key sha256.")


def find_cluster(named_file: Path | None, workspace: Path) -> Cluster:
    """The cluster that a command uses: from the file `named_file`, else from cluster.yaml in the workspace, else THIS_MACHINE.

    named_file: the cluster file that the user named, or None. workspace: the folder of the workspace. Raises InputError.
    """
    workspace_file = workspace / "cluster.yaml"
    if named_file is None and workspace_file.is_symlink() and not workspace_file.exists():
        raise InputError(f"{workspace_file}: is a symlink to a file that does not exist.")
    if named_file is None and not workspace_file.exists():
        return THIS_MACHINE
    return load_cluster(named_file or workspace_file, cloudlab_experiment.list_stored_manifests(workspace / ".shardlab"))
