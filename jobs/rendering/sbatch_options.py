"""Decides the sbatch options of a run, such as its time limit. Runs with the same options may share an array or allocation.

A cell without `time_limit` has `slurm.time` (shardlab/cluster/slurm_keys.py), which jobs/rendering/render.py fills in.
The options that request GPUs, by the key `gpu_request`, are chosen in shardlab/cluster/sbatch_request.py.
"""

from __future__ import annotations

import math

from jobs.launcher import find_launcher
from shardlab.cluster import sbatch_request
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Slurm
from shardlab.runs.run import Run

CPUS_PER_GPU = 8  # default of `cpus_per_rank` for ranks with a GPU
# Seconds by which Slurm's time limit exceeds the run's own time limit. The run needs this time to start, before its own limit
# begins to count, and then to save a checkpoint, close its records and end its processes.
LIMIT_MARGIN_S = 180


def list_sbatch_options(run: Run, cluster: Cluster) -> tuple[str, ...]:
    """The options of sbatch for a run, in long form without the dashes."""
    cluster = cluster.select_gpu_type(run.cell.gpu_type)
    slurm = cluster.slurm
    assert slurm is not None
    run_launcher = find_launcher(run.launcher)
    tasks_per_node = run.world.nproc_per_node if run_launcher.has_rank_tasks else 1
    named_values = {
        "clusters": run.slurm_cluster,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "licenses": slurm.licenses,
    }
    option_words = [f"{name}={value}" for name, value in named_values.items() if value is not None]
    option_words += [f"nodes={run.world.nnodes}", f"ntasks-per-node={tasks_per_node}"]
    option_words += sbatch_request.list_gpu_options(cluster, count_gpus_per_node(run, cluster), run.world.nnodes)
    takes_whole_nodes = slurm.exclusive and run.traces is None  # a run that reads traces is not timed: it may share nodes
    option_words.append(
        "exclusive" if takes_whole_nodes else f"cpus-per-task={count_cpus_per_task(run, cluster, slurm, tasks_per_node)}"
    )
    if slurm.mem is not None or takes_whole_nodes:
        option_words.append(f"mem={slurm.mem or 0}")  # 0: all memory of the node
    longest_s = slurm.max_time_s  # Slurm rejects, or never starts, a job with a longer limit
    limit_minutes = compute_limit_minutes(run)
    option_words.append(f"time={limit_minutes if longest_s is None else max(1, min(limit_minutes, longest_s // 60))}")
    # whether Slurm may restart the job of its own accord (jobs.status.retry_budget)
    option_words.append("requeue" if run.find_retry_limit("node_fail") else "no-requeue")
    # nodes that the cluster file excludes, and nodes that earlier attempts lost
    excluded_nodes = dict.fromkeys([*slurm.exclude, *run.avoid])
    option_words += [f"exclude={','.join(excluded_nodes)}"] if excluded_nodes else []
    # Variables of the submitting shell are not exported: they may not fit the nodes, and must not affect the measurement.
    option_words += ["open-mode=append", "export=NONE", *run_launcher.sbatch_options]
    return tuple(f"--{option}" for option in sbatch_request.change_options(slurm, option_words))


def count_gpus_per_node(run: Run, cluster: Cluster) -> int:
    """The number of GPUs of a run on each node; 0 if its ranks compute on the CPU or the cluster has no GPUs."""
    if not find_launcher(run.launcher).on_gpus or cluster.gpus is None or not cluster.gpus.per_node:
        return 0
    return math.ceil(run.cell.gpus / run.world.nnodes)


def count_cpus_per_task(run: Run, cluster: Cluster, slurm: Slurm, tasks_per_node: int) -> int:
    """The number of processors of each task of the job step, which is enough for all ranks that the task starts."""
    cpus_per_rank = slurm.cpus_per_rank or (CPUS_PER_GPU if count_gpus_per_node(run, cluster) else 1)
    return math.ceil(run.world.nproc_per_node / tasks_per_node) * cpus_per_rank


def compute_limit_minutes(run: Run) -> int:
    """Slurm's time limit for the job of a run, in minutes: the run's own limit and a margin. If the run begins a search, this
    time is counted once for each possible try."""
    assert run.limit_s is not None
    most_tries = run.search.most_tries if run.search is not None else 1
    return math.ceil(most_tries * (run.limit_s + LIMIT_MARGIN_S) / 60)
