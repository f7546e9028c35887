"""Proposes a commented cluster file for an experiment from its manifests and the hardware catalogue."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

import templates
from provision import gpu_generations
from provision.cloudlab import hardware, own_manifest
from provision.cloudlab.hardware import HardwareType
from shardlab.cloudlab import cloudlab_manifest
from shardlab.cloudlab.cloudlab_manifest import ManifestNode
from shardlab.cluster import cloudlab_keys
from shardlab.cluster.cloudlab_keys import EXTRA_DISK, ExperimentNode
from shardlab.errors import InputError

ROOT_DISK_FOLDER = "/srv/shardlab"  # the shared folder of an experiment whose nodes have no disk at /mydata


class ProposedGpus(msgspec.Struct, frozen=True):
    """The GPUs of each node, for the key `gpus` of the proposed cluster file."""

    per_node: int
    """The smallest number of GPUs of a node."""
    type: str | None
    """The GPU type; None: the nodes have different types."""
    memory_gib: int | None
    """Memory of one GPU; None: not known, or the nodes have different types."""


def propose_cluster_file(manifest_paths: Sequence[Path]) -> str:
    """The text of the proposed cluster file.

    manifest_paths: the manifest files of the experiment; empty: this machine is a node of the experiment and has the manifest.
    Raises InputError for a file that is not a manifest, or for nodes that do not share a network.
    """
    named_manifests = [(str(path), cloudlab_manifest.read_manifest(path)) for path in manifest_paths] or [_read_own_manifest()]
    experiment = cloudlab_manifest.parse_manifests(named_manifests)
    member_names = sorted(experiment.find_common_users())
    user_name = getpass.getuser()
    login_user = user_name if user_name in member_names else member_names[0] if len(member_names) == 1 else None
    source_names = ", ".join(manifest_name for manifest_name, _ in named_manifests)
    nodes = cloudlab_keys.select_nodes(experiment, login_user or next(iter(member_names), None), source_names)
    hardware_types = [hardware.load_catalogue().find_type(node.site, node.hardware or "") for node in experiment.nodes]
    manifest_name = _find_experiment_name(experiment.nodes[0])
    return templates.render(
        "cluster/cloudlab.yaml.j2",
        cluster_name=manifest_name or "experiment",
        is_name_known=manifest_name is not None,
        manifests=[str(path) for path in manifest_paths],
        nodes=_describe_nodes(nodes, hardware_types),
        members=member_names,
        user=login_user,
        expires=experiment.expires,
        gpus=_propose_gpus(hardware_types),
        kinds=sorted(
            {f"{node.hardware or 'a type that the manifest does not name'} at {node.site}" for node in experiment.nodes}
        ),
        wheels=_describe_wheels(hardware_types),
        shared=f"{EXTRA_DISK}/shardlab" if EXTRA_DISK in experiment.nodes[0].mounts else ROOT_DISK_FOLDER,
        has_disk=EXTRA_DISK in experiment.nodes[0].mounts,
        disk=EXTRA_DISK,
        server=nodes[0].name,
        nfs_folders=cloudlab_keys.NFS_FOLDERS,
    )


def _read_own_manifest() -> tuple[str, bytes]:
    """Read the manifest of this machine. Raises InputError if this machine is not a node of an experiment.

    Returns (the name of the manifest for error messages, the bytes of the manifest).
    """
    if not own_manifest.is_experiment_node():
        raise InputError(
            "--cloudlab names no manifest, and this machine is no node of an experiment, because it has no command "
            f"{own_manifest.MANIFEST_COMMAND[0]}. Allowed: --cloudlab FILE."
        )
    return " ".join(own_manifest.MANIFEST_COMMAND), own_manifest.read_own_manifest()


def _find_experiment_name(node: ManifestNode) -> str | None:
    """The name of the experiment, from the full host name of a node, shortened to a valid cluster name; None: not known."""
    host_labels = (node.full_name or "").lower().split(".")
    experiment_label = host_labels[1] if len(host_labels) > 2 and host_labels[0] == node.name.lower() else ""
    return experiment_label[:31] if re.match(r"^[a-z0-9][a-z0-9-]*\Z", experiment_label) else None


def _describe_nodes(nodes: Sequence[ExperimentNode], hardware_types: Sequence[HardwareType | None]) -> list[str]:
    """A line about each node: its host, hardware, GPUs and address. hardware_types: the catalogue's entries of the nodes."""
    return [
        f"{node.name}: {node.host}, {node.hardware or 'type not known'} at {node.site}"
        + (f", {_describe_gpus(hardware_type)}" if hardware_type is not None else "")
        + (f", trains on {node.network.address}" if node.network is not None else "")
        for node, hardware_type in zip(nodes, hardware_types, strict=True)
    ]


def _describe_gpus(entry: HardwareType) -> str:
    return f"{entry.gpus} x {entry.gpu}" if entry.gpus is not None and entry.gpu is not None else "GPUs not known"


def _propose_gpus(hardware_types: Sequence[HardwareType | None]) -> ProposedGpus | None:
    """The GPUs of each node; None if the catalogue does not know the number of GPUs of a node."""
    gpu_counts = [entry.gpus for entry in hardware_types if entry is not None and entry.gpus is not None]
    if len(gpu_counts) < len(hardware_types):
        return None
    models_with_memory = {(entry.gpu, entry.gpu_memory_gib) for entry in hardware_types if entry is not None}
    model_name, memory_gib = next(iter(models_with_memory)) if len(models_with_memory) == 1 else (None, None)
    return ProposedGpus(min(gpu_counts), model_name.lower().replace(" ", "-") if model_name is not None else None, memory_gib)


def _describe_wheels(hardware_types: Sequence[HardwareType | None]) -> list[str]:
    """For each hardware type that the usual build of torch does not support, a sentence with the builds that support it."""
    sentences = []
    for type_entry in {type_entry.name: type_entry for type_entry in hardware_types if type_entry is not None}.values():
        releases = hardware.list_cuda_builds(type_entry)
        if releases is None or gpu_generations.USUAL_CUDA in releases:
            continue
        usual_build = f"torch {gpu_generations.TORCH_VERSION} for CUDA {gpu_generations.USUAL_CUDA}, which pip installs"
        needed_clause = f"it needs wheels of torch for CUDA {' or '.join(releases)}" if releases else "and no other build does"
        sentences.append(f"{type_entry.name}: {usual_build}, does not support its {type_entry.gpu} GPUs; {needed_clause}")
    return sentences
