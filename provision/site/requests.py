"""The options of sbatch for the jobs that `provision` itself submits at a site: to install and to verify."""

from __future__ import annotations

from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_cluster import VARIABLE

# Removes variables of the login shell: SBATCH_PARTITION and others would change a request, SQUEUE_STATES would hide jobs.
# SLURM_CLUSTERS stays, because it says which cluster Slurm's commands address (`variables` of the login node).
WITHOUT_VARIABLES = r"""
for name in $(env | sed -n 's/^\(S\(LURM\|BATCH\|QUEUE\)_[A-Z0-9_]*\)=.*/\1/p'); do
    case $name in SLURM_CONF | SLURM_CLUSTERS) ;; *) unset "$name" ;; esac
done
"""


PIP_CPUS = 2


def sbatch_options(cluster: Cluster, *, nodes: int, minutes: int, gpus: int | None = None, cpus: int = PIP_CPUS) -> list[str]:
    """The options of sbatch for a job with one task on each of `nodes` nodes.

    minutes: the time limit of the job.
    gpus: the number of GPUs per node for a job that tests nodes; with slurm.exclusive, the job gets whole nodes. None: for a
    job that installs packages; the job gets `cpus` CPUs of any node, and one GPU if the partition has GPUs, because some
    partitions accept no job without a GPU.
    cpus: the number of CPUs per node, unless the job gets whole nodes.
    """
    slurm = cluster.slurm
    assert slurm is not None
    option_values = {
        "clusters": slurm.cluster,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "licenses": slurm.licenses,
        "exclude": ",".join(slurm.exclude) or None,
    }
    arguments = [f"--{name}={value}" for name, value in option_values.items() if value is not None]
    longest_s = slurm.max_time_s  # some sites accept a job with a longer time limit but never start the job
    minutes = minutes if longest_s is None else max(1, min(minutes, longest_s // 60))
    arguments += [f"--nodes={nodes}", "--ntasks-per-node=1", f"--time={minutes}", "--export=NONE"]
    if gpus is not None and slurm.exclusive:
        arguments += ["--exclusive", f"--mem={slurm.mem or 0}"]  # --mem=0: all memory of the node
    else:
        arguments.append(f"--cpus-per-task={cpus}")
        arguments += [f"--mem={slurm.mem}"] if slurm.mem is not None else []
    per_node = cluster.gpus.per_node if cluster.gpus is not None else 0
    gpu_count = min(1, per_node) if gpus is None else gpus
    if gpu_count:
        arguments.append(gpu_option(cluster, gpu_count, nodes))
    arguments += [f"--{name}" if value is None else f"--{name}={value}" for name, value in slurm.extra.items()]
    return arguments


def cluster_variables(cluster: str | None) -> dict[str, str]:
    """The variable by which Slurm's commands on a login node address this cluster; empty for None, the default cluster."""
    return {} if cluster is None else {VARIABLE: cluster}


def gpu_option(cluster: Cluster, per_node: int, nodes: int) -> str:
    """The option of sbatch that requests GPUs in the way that the cluster file names in slurm.gpu_request."""
    assert cluster.slurm is not None
    name = f"{cluster.gpus.type}:" if cluster.gpus is not None and cluster.gpus.type else ""
    match cluster.slurm.gpu_request:
        case "gres":
            return f"--gres=gpu:{name}{per_node}"
        case "gpus":
            return f"--gpus={name}{per_node * nodes}"
        case "gpus-per-node":
            return f"--gpus-per-node={name}{per_node}"
