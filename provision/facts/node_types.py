"""The kinds of nodes in each partition of a Slurm cluster: how many, with which processors, memory, GPUs and features."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery
from provision.facts.slurm_text import is_name
from shardlab.cluster.slurm_cluster import drop_cluster_headers
from shardlab.cluster.slurm_keys import MOST_GPUS
from shardlab.record_types import PLAIN_WORD_PATTERN

SINFO_FORMAT = "%R|%D|%c|%m|%G|%f|%N"
MOST_FEATURES = 32
_GPU_GRES = re.compile(r"^gpu(?::([^:()]*[^:()\d][^:()]*))?(?::no_consume)?(?::(\d+))?\Z")  # without a number: one GPU
_GPU_TYPE = re.compile(PLAIN_WORD_PATTERN)
_NODE_NAMES = re.compile(r"^[A-Za-z0-9._,\[\]-]{1,20000}\Z")
_GRES_SOCKETS = re.compile(r"\([^()]*\)")  # the sockets of a generic resource, such as `(S:0-1)` after `gpu:a100:4`


class GpuGres(msgspec.Struct, frozen=True):
    """The GPUs of one type on a node, as Slurm counts them."""

    type: str | None
    """None if Slurm does not know the type of the GPUs."""
    count: int


class NodeType(msgspec.Struct, frozen=True):
    """Nodes of a partition with the same CPUs, memory, GPUs and features."""

    partition: str
    count: int
    cpus: int
    memory_mib: int
    gpus: tuple[GpuGres, ...] = ()
    features: tuple[str, ...] = ()
    names: str = ""
    """The names of the nodes, in Slurm's short form such as gpu[1-8]."""

    def __str__(self) -> str:
        gpus_text = " + ".join(f"{gpu.count} GPUs {gpu.type or ''}".rstrip() for gpu in self.gpus)
        return f"nodes with {self.cpus} CPUs{f' and {gpus_text}' if gpus_text else ''}"


def build_command(python: str) -> list[str]:
    # Removes the variable SINFO_PARTITION: with this variable, sinfo would list only the partitions in its value.
    return ["env", "-u", "SINFO_PARTITION", "sinfo", "--noheader", "--exact", f"--format={SINFO_FORMAT}"]


def parse(stdout: str) -> tuple[NodeType, ...]:
    """The types of nodes in the output of sinfo. Raises ValueError if a line has another form."""
    node_types = []
    for line in drop_cluster_headers(stdout).splitlines():
        line_fields = line.split("|")
        if len(line_fields) != 7:
            raise ValueError(f"found {line[:80]!r}. Allowed: {SINFO_FORMAT}.")
        partition, node_count, cpus, memory_text, gres, features, names = (line_field.strip() for line_field in line_fields)
        if is_name(partition) and node_count.isdigit() and cpus.isdigit() and memory_text.isdigit():
            feature_names = tuple(feature_name for feature_name in features.split(",") if is_name(feature_name))[:MOST_FEATURES]
            node_types.append(
                NodeType(
                    partition,
                    int(node_count),
                    int(cpus),
                    int(memory_text),
                    parse_gpus(gres),
                    () if features == "(null)" else feature_names,
                    names if _NODE_NAMES.match(names) else "",
                )
            )
    return tuple(node_types)


def parse_gpus(gres: str) -> tuple[GpuGres, ...]:
    """The GPUs in a list of generic resources, such as `gpu:a100:4(S:0-1),nvme:1`."""
    count_by_type: dict[str | None, int] = {}  # by type; Slurm adds the counts of words with the same type
    for gres_word in _GRES_SOCKETS.sub("", gres).split(","):
        if (gpu_match := _GPU_GRES.match(gres_word.strip())) and (gpu_match[1] is None or _GPU_TYPE.match(gpu_match[1])):
            count_by_type[gpu_match[1]] = count_by_type.get(gpu_match[1], 0) + int(gpu_match[2] or 1)
    return tuple(GpuGres(gpu_type, count) for gpu_type, count in count_by_type.items() if 0 < count <= MOST_GPUS)


NODE_TYPES = FactQuery("node types", build_command, parse, timeout_s=60)
