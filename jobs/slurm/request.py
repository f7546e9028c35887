"""The sbatch options of a run. Runs with the same options may share a job array or an allocation."""

from __future__ import annotations

import math

from jobs.launcher import launcher
from shardlab.cluster import Cluster, Slurm
from shardlab.run import Run

CPUS_PER_GPU = 8  # default of `cpus_per_rank` for ranks with a GPU
# Seconds by which Slurm's time limit exceeds the run's own: to start, to save, to close records and to end processes.
MARGIN_S = 180


def options(run: Run, cluster: Cluster) -> tuple[str, ...]:
    """sbatch's options in long form, in the order in which a person looks for them."""
    asked = cluster.slurm
    assert asked is not None
    started = launcher(run.launcher)
    tasks = run.world.nproc_per_node if started.per_rank else 1
    found = [f"partition={asked.partition}"]
    for name, value in (("account", asked.account), ("qos", asked.qos), ("constraint", asked.constraint)):
        found += [f"{name}={value}"] if value is not None else []
    found += [f"nodes={run.world.nnodes}", f"ntasks-per-node={tasks}"]
    if gpus := gpus_per_node(run, cluster):
        kind = f"{cluster.gpus.type}:" if cluster.gpus and cluster.gpus.type else ""
        found.append(f"gpus-per-node={kind}{gpus}" if asked.gpu_request == "gpus-per-node" else f"gres=gpu:{kind}{gpus}")
    found += ["exclusive", "mem=0"] if asked.exclusive else [f"cpus-per-task={cpus_per_task(run, cluster, asked, tasks)}"]
    found.append(f"time={minutes(run)}")
    found.append("requeue" if run.requeues else "no-requeue")
    found += [f"exclude={','.join(run.avoid)}"] if run.avoid else []
    # Variables of the submitting shell may not fit the nodes, and are no part of what is measured.
    found += ["open-mode=append", "export=NONE", *started.sbatch]
    found += [name if value is None else f"{name}={value}" for name, value in asked.extra.items()]
    return tuple(f"--{option}" for option in found)


def gpus_per_node(run: Run, cluster: Cluster) -> int:
    """GPUs on each node, 0 for ranks that are forked on the CPU and on a cluster without GPUs."""
    if run.launcher == "fork" or cluster.gpus is None or not cluster.gpus.per_node:
        return 0
    return math.ceil(run.cell.gpus / run.world.nnodes)


def cpus_per_task(run: Run, cluster: Cluster, asked: Slurm, tasks: int) -> int:
    cpus_per_rank = asked.cpus_per_rank or (CPUS_PER_GPU if gpus_per_node(run, cluster) else 1)
    return math.ceil(run.world.nproc_per_node / tasks) * cpus_per_rank


def minutes(run: Run) -> int:
    """Slurm's time limit of a run, in minutes: the run's own limit and a margin."""
    assert run.limit_s is not None
    return math.ceil((run.limit_s + MARGIN_S) / 60)
