"""What requests to sbatch have in common, from runs and from `provision`, and which keys decide what Slurm rejects.

Options are in long form without the dashes, such as `mem=0`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Slurm

_MEMORY_OPTIONS = ("mem-per-cpu", "mem-per-gpu")  # sbatch accepts only one of these and --mem
# Patterns of Slurm's words for a rejected request, each with the keys of the cluster file that decide this part of the request.
_KEYS_BY_PATTERN = {
    r"(?i:invalid partition)": ("slurm.partition",),  # first, because the name of the partition follows
    r"entry for --cluster|No cluster": ("slurm.cluster",),
    r"account/partition": ("slurm.account", "slurm.partition"),
    r"(?i:account)": ("slurm.account",),
    r"(?i:qos)": ("slurm.qos",),
    r"(?i:exclusive|oversubscribe|shared? nodes?|whole nodes?)": ("slurm.exclusive", "slurm.omit: [exclusive]"),
    r"(?i:mem-per-cpu|memory per cpu)": ("slurm.extra: {mem-per-cpu: 4G}",),
    r"(?i:--mem\b|memory)": ("slurm.mem", "slurm.omit: [mem]", "slurm.extra: {mem-per-cpu: 4G}"),
    r"(?i:gres|gpu)|generic resource": (
        "slurm.gpu_request (none, if Slurm counts no GPUs)", "gpus.type", "gpus.per_node", "slurm.provision.gpus",
    ),
    r"(?i:ntasks)": ("slurm.omit: [ntasks-per-node]",),
    r"(?i:requeue)": ("slurm.omit: [requeue]",),
    r"(?i:export)": ("slurm.omit: [export]",),
    r"(?i:feature|constraint)": ("slurm.constraint",),
    r"(?i:licen[cs]e)": ("slurm.licenses",),
    r"(?i:reservation)": ("slurm.extra: {reservation: NAME}",),
    r"(?i:node name)": ("slurm.exclude",),
    r"(?i:time ?limit|wall)": ("slurm.time",),
    r"(?i:node count|max_?nodes|too many nodes)": ("slurm.max_nodes",),
    r"(?i:processors|cpu count|cpus)": ("slurm.cpus_per_rank", "slurm.omit: [cpus-per-task]"),
    r"(?i:partition)": ("slurm.partition",),
    r"node configuration": (
        "slurm.partition", "slurm.constraint", "slurm.mem", "slurm.cpus_per_rank", "slurm.exclude", "gpus.type",
        "gpus.per_node",
    ),
}  # fmt: skip


def list_gpu_options(cluster: Cluster, gpus_per_node: int, node_count: int) -> list[str]:
    """The option that requests GPUs in the way that the cluster file names in slurm.gpu_request, as a list; [] for none.

    gpus_per_node: the number of GPUs on each of `node_count` nodes.
    """
    assert cluster.slurm is not None
    if not gpus_per_node or cluster.slurm.gpu_request == "none":
        return []
    type_prefix = f"{cluster.gpus.type}:" if cluster.gpus is not None and cluster.gpus.type else ""
    option_by_request = {
        "gpus-per-node": f"gpus-per-node={type_prefix}{gpus_per_node}",
        "gres": f"gres=gpu:{type_prefix}{gpus_per_node}",
        "gpus": f"gpus={type_prefix}{gpus_per_node * node_count}",
    }
    return [option_by_request[cluster.slurm.gpu_request]]


def change_options(slurm: Slurm, sbatch_options: Sequence[str]) -> list[str]:
    """These options without those that `slurm.omit` names, followed by those of `slurm.extra`."""
    omitted_options = {*slurm.omit, *(["no-requeue"] if "requeue" in slurm.omit else [])}
    if any(name in slurm.extra for name in _MEMORY_OPTIONS):
        omitted_options.add("mem")
    sent_options = [option for option in sbatch_options if option.partition("=")[0] not in omitted_options]
    return sent_options + [name if value is None else f"{name}={_quote(str(value))}" for name, value in slurm.extra.items()]


def _quote(option_value: str) -> str:
    """The value as sbatch reads it from a line #SBATCH, where a space ends a value without quotes."""
    return f'"{option_value}"' if " " in option_value else option_value


def advise_on_rejection(rejection: str) -> str:
    """A sentence that names the keys of the cluster file which decide what Slurm rejects; '' if they are not known.

    rejection: Slurm's words.
    """
    key_names = next((key_names for pattern, key_names in _KEYS_BY_PATTERN.items() if re.search(pattern, rejection)), ())
    return f"Decided in the cluster file by: {', '.join(key_names)}." if key_names else ""
