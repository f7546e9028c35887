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


def sbatch_options(
    cluster: Cluster, *, node_count: int, minutes: int, gpu_count: int | None = None, cpu_count: int = PIP_CPUS
) -> list[str]:
    """The options of sbatch for a job with one task on each of `node_count` nodes.

    minutes: the time limit of the job.
    gpu_count: the number of GPUs per node for a job that tests nodes; with slurm.exclusive, the job gets whole nodes. None: for
    a job that installs packages; the job gets `cpu_count` CPUs of any node, and the GPUs of slurm.provision. cpu_count: the
    number of CPUs per node, unless the job gets whole nodes."""
    assert cluster.slurm is not None
    slurm, provision = _use_own_values(cluster.slurm, tests_nodes=gpu_count is not None), cluster.slurm.provision
    option_values = {
        "clusters": slurm.cluster,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "licenses": slurm.licenses,
        "exclude": ",".join(slurm.exclude) or None,
    }
    option_words = [f"{name}={value}" for name, value in option_values.items() if value is not None]
    longest_s = slurm.max_time_s  # some sites accept a job with a longer time limit but never start the job
    minutes = minutes if longest_s is None else max(1, min(minutes, longest_s // 60))
    option_words += [f"nodes={node_count}", "ntasks-per-node=1", f"time={minutes}", "export=NONE"]
    if gpu_count is not None and slurm.exclusive:
        option_words += ["exclusive", f"mem={slurm.mem or 0}"]  # mem=0: all memory of the node
    else:
        option_words.append(f"cpus-per-task={cpu_count}")
        option_words += [f"mem={slurm.mem}"] if slurm.mem is not None else []
    if gpu_count is None:
        per_node = cluster.gpus.per_node if cluster.gpus is not None else 0
        # some partitions accept no job without a GPU
        gpu_count = provision.gpus if provision is not None and provision.gpus is not None else min(1, per_node)
    option_words += sbatch_request.gpu_options(cluster, gpu_count, node_count)
    return [f"--{option}" for option in sbatch_request.change_options(slurm, option_words)]


def cluster_variables(cluster: str | None) -> dict[str, str]:
    """The variable by which Slurm's commands on a login node address this cluster; empty for None, the default cluster."""
    return {} if cluster is None else {VARIABLE: cluster}


def _use_own_values(slurm: Slurm, *, tests_nodes: bool) -> Slurm:
    """The keys `slurm` for a job of `provision`, with the values of slurm.provision.

    tests_nodes: whether the job tests the nodes of runs, which are in the partition of runs.
    """
    its_keys = slurm.provision
    if its_keys is None or (tests_nodes and its_keys.partition is not None):
        return slurm
    extra = slurm.extra if its_keys.extra is None else its_keys.extra
    account, qos = its_keys.account or slurm.account, its_keys.qos or (slurm.qos if its_keys.partition is None else None)
    if tests_nodes:
        return msgspec.structs.replace(slurm, account=account, qos=qos)
    if its_keys.partition is None:
        own_time = its_keys.time or slurm.max_time
        constraint = its_keys.constraint or slurm.constraint
        return msgspec.structs.replace(slurm, account=account, qos=qos, constraint=constraint, max_time=own_time, extra=extra)
    changed_values = {
        "account": account,
        "qos": qos,
        "constraint": its_keys.constraint,
        "max_time": its_keys.time,
        "extra": extra,
    }
    return msgspec.structs.replace(slurm, partition=its_keys.partition, exclude=[], mem=None, **changed_values)
