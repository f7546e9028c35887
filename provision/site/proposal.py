"""Proposes the values of a cluster file for a Slurm site from the site's answers. The functions here ask the site nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from provision.facts.node_types import GpuGres, NodeType
from provision.facts.partitions import SitePartition
from provision.facts.pythons import OLDEST_PYTHON
from provision.facts.shared_folders import SharedFolder
from provision.site.requests import list_sbatch_options
from provision.site.survey import Survey
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import MOST_CPUS_PER_RANK, GpuRequest, Gpus, OmittableOption, Slurm, is_slice

HOUR_S = 3600
LONGEST_S = 1000 * 86_400 - 1  # the longest time that a cluster file allows: less than 1000 days
PYTHON_MODULES = ("python", "python3", "cpython", "cray-python")
GPU_REQUESTS: tuple[GpuRequest, ...] = ("gpus-per-node", "gres", "gpus")
OMISSIONS_TO_TRY: tuple[tuple[OmittableOption, ...], ...] = ((), ("mem",), ("exclusive",), ("mem", "exclusive"))
_LARGE_FOLDER_VARIABLE = re.compile(r"^[A-Z_]*(SCRATCH|WORK|PROJECT)[A-Z0-9_]*\Z")
_LARGE_PATH = re.compile(r"scratch|work|project", re.I)
_MODULE_VERSION = re.compile(r"/(\d+)\.(\d+)")


class RequestKeys(NamedTuple):
    """The keys of the cluster file that decide how jobs request GPUs and whole nodes."""

    gpu_request: GpuRequest | None
    """None: the nodes have no GPUs that Slurm counts."""
    omit: tuple[OmittableOption, ...] = ()

    def __str__(self) -> str:
        omit = f"omit: [{', '.join(self.omit)}]" if self.omit else ""
        return ", ".join(filter(None, [self.gpu_request, omit])) or "no GPU"

    @property
    def is_fallback(self) -> bool:
        """Whether the request is only worth trying if Slurm rejects all others."""
        return self.gpu_request == "none" or bool(self.omit)


class Proposal(msgspec.Struct, frozen=True):
    """The proposed values of a cluster file. None: no value is proposed, and a comment in the file says why."""

    partition: SitePartition | None
    node_type: NodeType | None
    account: str | None
    accounts: tuple[str, ...]
    """All accounts of the user that are valid in the partition."""
    qos: tuple[str, ...]
    """The QOS that the user may choose with the account in the partition."""
    needed_qos: str | None
    """A QOS that jobs must name, because the account's default QOS is not allowed in the partition."""
    module: str | None
    """A module whose Python is new enough; None: no module is needed, or there is none."""
    python: str | None
    """The interpreter, if its name is not python3."""
    folder: SharedFolder | None
    has_python: bool


def propose_partition(site: Survey) -> Proposal:
    """The proposal for one partition that this user may use: a partition with GPUs is preferred to the default partition."""
    usable = [partition for partition in site.partitions if _is_usable(site, partition)]
    gpu_partitions = [partition for partition in usable if _find_largest_type(site, partition.name, with_gpus=True) is not None]
    default_partitions = [partition for partition in usable if partition.is_default]
    ordered_partitions = [
        *[partition for partition in gpu_partitions if partition.is_default],
        *gpu_partitions,
        *default_partitions,
        *usable,
    ]
    partition = ordered_partitions[0] if ordered_partitions else None
    accounts = (find_valid_accounts(site, partition) or ()) if partition is not None else ()
    account = accounts[0] if accounts else None
    qos, needed_qos = _choose_qos(site, partition, account) if partition is not None else ((), None)
    python_module, python_path, has_python = _choose_python(site)
    return Proposal(
        partition=partition,
        node_type=_find_largest_type(site, partition.name, with_gpus=partition in gpu_partitions)
        if partition is not None
        else None,
        account=account,
        accounts=accounts,
        qos=qos,
        needed_qos=needed_qos,
        module=python_module,
        python=python_path,
        folder=_choose_folder(site),
        has_python=has_python,
    )


def find_valid_accounts(survey: Survey, partition: SitePartition) -> tuple[str, ...] | None:
    """The user's accounts that are valid in a partition, an account for GPUs first. () if the user's accounts are not known;
    None if the partition accepts no account of the user."""
    if not survey.associations:
        return ()
    names = {
        entry.account
        for entry in survey.associations
        if entry.partition in (None, partition.name) and (not entry.qos or _select_allowed_qos(entry.qos, partition))
    }
    allowed_accounts = names - set(partition.denied_accounts) if partition.accounts is None else names & set(partition.accounts)
    if not allowed_accounts:
        return None
    has_gpus = _find_largest_type(survey, partition.name, with_gpus=True) is not None
    return tuple(sorted(allowed_accounts, key=lambda name: (not (has_gpus and re.search(r"[_-]g(pu)?$", name)), name)))


def _is_usable(survey: Survey, partition: SitePartition) -> bool:
    return partition.is_up and not partition.is_root_only and find_valid_accounts(survey, partition) is not None


def _select_allowed_qos(qos_names: Iterable[str], partition: SitePartition) -> list[str]:
    """The QOS of `qos_names` that jobs of the partition may have."""
    if partition.qos is not None:
        return [qos_name for qos_name in qos_names if qos_name in partition.qos]
    return [qos_name for qos_name in qos_names if qos_name not in partition.denied_qos]


def _choose_qos(survey: Survey, partition: SitePartition, account: str | None) -> tuple[tuple[str, ...], str | None]:
    """Which QOS a job of this account may have in the partition.

    Returns (the QOS that the user may choose, the QOS that a job must name or None if the account's default is allowed).
    """
    entries = [entry for entry in survey.associations if entry.account == account and entry.partition in (None, partition.name)]
    allowed_names = tuple(_select_allowed_qos(sorted({name for entry in entries for name in entry.qos}), partition))
    default_qos = [entry.default_qos for entry in entries]
    is_restricted = partition.qos is not None or partition.denied_qos
    if not allowed_names or not is_restricted or any(name in allowed_names for name in default_qos):
        return allowed_names, None
    return allowed_names, allowed_names[0]


class TypedPartition(NamedTuple):
    """A partition, with one of the types of GPUs that its nodes have."""

    partition: SitePartition
    gpus: GpuGres


def propose_typed_partitions(survey: Survey, proposal: Proposal) -> list[TypedPartition]:
    """For each type of GPUs, one partition that accepts the proposed account and QOS. The proposed partition comes first."""
    usable_partitions = [partition for partition in survey.partitions if _is_usable(survey, partition)]
    usable_partitions.sort(key=lambda partition: partition != proposal.partition)
    partition_by_type: dict[str, TypedPartition] = {}
    for partition in usable_partitions:
        if propose_time_s(partition) < propose_time_s(proposal.partition):  # a cluster file has one time limit
            continue
        if proposal.account is not None and proposal.account not in (find_valid_accounts(survey, partition) or ()):
            continue
        if proposal.needed_qos is not None and not _select_allowed_qos([proposal.needed_qos], partition):
            continue
        if proposal.needed_qos is None and _choose_qos(survey, partition, proposal.account)[1] is not None:
            continue
        node_types = [node_type for node_type in survey.node_types if node_type.partition == partition.name]
        for node_type in sorted(node_types, key=lambda node_type: -node_type.count):
            for gpu in node_type.gpus:
                if gpu.type is not None:
                    partition_by_type.setdefault(gpu.type, TypedPartition(partition, gpu))
    return list(partition_by_type.values())


def propose_time_s(partition: SitePartition | None) -> int:
    """The proposed time limit of runs, in seconds: an hour, or less if the partition allows less."""
    return min((partition.max_time_s if partition is not None else None) or HOUR_S, HOUR_S)


def propose_requests(proposal: Proposal) -> dict[RequestKeys, list[str]]:
    """For each way in which runs may request a whole node, the options of sbatch; the best way first, and last those for sites
    that reject an option. Empty if no partition is proposed."""
    partition, node_type = proposal.partition, proposal.node_type
    if partition is None or node_type is None:
        return {}
    gpu = choose_gpus(node_type)
    gpu_keys = Gpus(gpu.count, gpu.type) if gpu is not None else None
    gpu_count, cpu_count = (gpu.count, gpu.count * count_cpus_per_rank(node_type)) if gpu is not None else (0, 1)
    gpu_requests: list[GpuRequest | None] = [None] if gpu_keys is None else [*GPU_REQUESTS, "none"]
    options_by_keys: dict[RequestKeys, list[str]] = {}
    for request_keys in [RequestKeys(gpu_request, omit) for omit in OMISSIONS_TO_TRY for gpu_request in gpu_requests]:
        slurm_section = Slurm(
            partition=partition.name,
            account=proposal.account,
            qos=proposal.needed_qos,
            gpu_request=request_keys.gpu_request or "none",
            exclusive=must_use_whole_nodes(proposal),
            omit=list(request_keys.omit),
        )
        cluster = Cluster(schema=1, name="site", provider="slurm", slurm=slurm_section, gpus=gpu_keys)
        request_options = list_sbatch_options(cluster, node_count=1, minutes=5, gpu_count=gpu_count, cpu_count=cpu_count)
        if request_options not in options_by_keys.values():
            options_by_keys[request_keys] = request_options
    return options_by_keys


def must_use_whole_nodes(proposal: Proposal) -> bool:
    """Whether runs get whole nodes: nodes without GPUs, and those of a partition that gives only whole nodes."""
    partition, node_type = proposal.partition, proposal.node_type
    return partition is None or partition.is_exclusive or node_type is None or not node_type.gpus


def choose_gpus(node_type: NodeType) -> GpuGres | None:
    """The GPUs of a node that runs use: whole GPUs before slices (MIG), then the type with most GPUs; None if it has none."""
    return max(node_type.gpus, key=lambda gpu: (not is_slice(gpu.type or ""), gpu.count), default=None)


def count_cpus_per_rank(node_type: NodeType) -> int:
    """The processors of a node that each rank may have."""
    gpu = choose_gpus(node_type)
    return min(max(1, node_type.cpus // (gpu.count if gpu is not None else 1)), MOST_CPUS_PER_RANK)


def _find_largest_type(survey: Survey, partition: str, *, with_gpus: bool) -> NodeType | None:
    """The node type with the most nodes in a partition; None if there is none. with_gpus: only types with GPUs are
    considered."""
    partition_types = [
        node_type for node_type in survey.node_types if node_type.partition == partition and (node_type.gpus or not with_gpus)
    ]
    return max(partition_types, key=lambda node_type: node_type.count, default=None)


def _choose_python(survey: Survey) -> tuple[str | None, str | None, bool]:
    """Choose a Python of the site.

    Returns (a module or None, an interpreter or None, whether any Python is new enough). For python3, the first two are None.
    """
    python3_paths = [path for path in survey.pythons if path.endswith("/python3") and survey.pythons[path] >= OLDEST_PYTHON]
    if python3_paths:
        return None, None, True
    other_paths = [path for path, version in survey.pythons.items() if version >= OLDEST_PYTHON]
    if other_paths:
        return None, other_paths[0], True
    version_and_module = [
        (version, name)
        for name in survey.modules
        if is_python_module(name)
        and (match := _MODULE_VERSION.search(name))
        and (version := (int(match[1]), int(match[2]))) >= OLDEST_PYTHON
    ]
    return (max(version_and_module)[1] if version_and_module else None), None, bool(version_and_module)


def is_python_module(module_name: str) -> bool:
    """Whether a module, such as `python/3.12.4`, provides a Python, judged by its name."""
    return module_name.rpartition("/")[0].rpartition("/")[2].lower() in PYTHON_MODULES


def _choose_folder(survey: Survey) -> SharedFolder | None:
    """The folder for runs: a folder in a network file system, or a folder for large data. `_make_folder_sort_key` has the
    order."""
    large_folders = [folder for folder in survey.folders if folder.is_network or _is_large(folder)]
    return max(large_folders, key=_make_folder_sort_key, default=None)


def _is_large(shared_folder: SharedFolder) -> bool:
    """Whether the folder is for large data: its variable, or, without a variable, its path has a word such as scratch."""
    if shared_folder.variable:
        return _LARGE_FOLDER_VARIABLE.match(shared_folder.variable) is not None
    return _LARGE_PATH.search(shared_folder.path.rpartition("/")[0]) is not None


def _make_folder_sort_key(shared_folder: SharedFolder) -> tuple[bool, bool, bool, int]:
    """The sort key by which folders are compared; the largest key wins.

    Folders for large data come first, because variables such as CONDA_PREFIX may name folders in the home folder. The home
    folder itself comes last.
    """
    return _is_large(shared_folder), shared_folder.variable != "HOME", shared_folder.is_network, shared_folder.free_bytes or 0
