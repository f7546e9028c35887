"""The options of sbatch for the jobs that `provision` itself submits at a site: to install and to verify."""

from __future__ import annotations

import msgspec

from shardlab.cluster import sbatch_request
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_cluster import VARIABLE
from shardlab.cluster.slurm_keys import Slurm

# Removes variables of the login shell: SBATCH_PARTITION and others would change a request, SQUEUE_STATES would hide jobs.
# SLURM_CLUSTERS stays, because it says which cluster Slurm's commands address (`variables` of the login node).
WITHOUT_VARIABLES = r"""
for name in $(env | sed -n 's/^\(S\(LURM\|BATCH\|QUEUE\)_[A-Z0-9_]*\)=.*/\1/p'); do
    case $name in SLURM_CONF | SLURM_CLUSTERS) ;; *) unset "$name" ;; esac
done
"""

PIP_CPUS = 2


def list_sbatch_options(
    cluster: Cluster, *, node_count: int, minutes: int, gpu_count: int | None = None, cpu_count: int = PIP_CPUS
) -> list[str]:
    """The options of sbatch for a job with one task on each of `node_count` nodes.

    minutes: the time limit of the job.
    gpu_count: the number of GPUs per node for a job that tests nodes; with slurm.exclusive, the job gets whole nodes. None: for
    a job that installs packages; the job gets `cpu_count` CPUs of any node, and the GPUs of slurm.provision. cpu_count: the
    number of CPUs per node, unless the job gets whole nodes."""
    assert cluster.slurm is not None
    slurm_keys, provision_keys = _use_own_values(cluster.slurm, is_node_test=gpu_count is not None), cluster.slurm.provision
    option_values = {
        "clusters": slurm_keys.cluster,
        "partition": slurm_keys.partition,
        "account": slurm_keys.account,
        "qos": slurm_keys.qos,
        "constraint": slurm_keys.constraint,
        "licenses": slurm_keys.licenses,
        "exclude": ",".join(slurm_keys.exclude) or None,
    }
    option_words = [f"{name}={value}" for name, value in option_values.items() if value is not None]
    longest_s = slurm_keys.max_time_s  # some sites accept a job with a longer time limit but never start the job
    minutes = minutes if longest_s is None else max(1, min(minutes, longest_s // 60))
    option_words += [f"nodes={node_count}", "ntasks-per-node=1", f"time={minutes}", "export=NONE"]
    if gpu_count is not None and slurm_keys.exclusive:
        option_words += ["exclusive", f"mem={slurm_keys.mem or 0}"]  # mem=0: all memory of the node
    else:
        option_words.append(f"cpus-per-task={cpu_count}")
        option_words += [f"mem={slurm_keys.mem}"] if slurm_keys.mem is not None else []
    if gpu_count is None:
        per_node = cluster.gpus.per_node if cluster.gpus is not None else 0
        # some partitions accept no job without a GPU
        gpu_count = provision_keys.gpus if provision_keys is not None and provision_keys.gpus is not None else min(1, per_node)
    option_words += sbatch_request.list_gpu_options(cluster, gpu_count, node_count)
    return [f"--{option}" for option in sbatch_request.change_options(slurm_keys, option_words)]


def list_cluster_variables(slurm_cluster: str | None) -> dict[str, str]:
    """The variable by which Slurm's commands on a login node address this cluster; empty for None, the default cluster."""
    return {} if slurm_cluster is None else {VARIABLE: slurm_cluster}


def _use_own_values(slurm: Slurm, *, is_node_test: bool) -> Slurm:
    """The keys `slurm` for a job of `provision`, with the values of slurm.provision.

    is_node_test: whether the job tests the nodes of runs, which are in the partition of runs.
    """
    own_keys = slurm.provision
    if own_keys is None or (is_node_test and own_keys.partition is not None):
        return slurm
    extra = slurm.extra if own_keys.extra is None else own_keys.extra
    account, qos = own_keys.account or slurm.account, own_keys.qos or (slurm.qos if own_keys.partition is None else None)
    if is_node_test:
        return msgspec.structs.replace(slurm, account=account, qos=qos)
    if own_keys.partition is None:
        max_time = own_keys.time or slurm.max_time
        constraint = own_keys.constraint or slurm.constraint
        return msgspec.structs.replace(slurm, account=account, qos=qos, constraint=constraint, max_time=max_time, extra=extra)
    changed_values = {
        "account": account,
        "qos": qos,
        "constraint": own_keys.constraint,
        "max_time": own_keys.time,
        "extra": extra,
    }
    return msgspec.structs.replace(slurm, partition=own_keys.partition, exclude=[], mem=None, **changed_values)
