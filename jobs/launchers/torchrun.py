"""PyTorch's own launcher: a new process for every rank, rendezvous by c10d."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.run import Run

_RANK = ("-m", "trainers", "run", ".")
JOIN_S = 600  # torchrun's own limit for all nodes to come to the rendezvous


def command(run: Run, python: str) -> list[str]:
    """The words that start all ranks of a run on one node."""
    return [
        *_torchrun(run, python),
        "--rdzv-endpoint=127.0.0.1:0",  # port 0: a free one, so that runs cannot meet each other
        "--local-addr=127.0.0.1",  # the machine's own name need not resolve
        f"--rdzv-id={run.run_id}",
        *_RANK,
    ]


def task(run: Run, python: str) -> list[str]:
    """The words that start the ranks of one node in a job step over several nodes."""
    return [
        *_torchrun(run, python),
        "--rdzv-endpoint=$SHARDLAB_RENDEZVOUS",  # on the job's first node, at a port that was free there
        # Without is_host, torchrun compares host names to find the first node, which can go wrong.
        f"--rdzv-conf=is_host=$SHARDLAB_IS_FIRST{_patience(run)}",
        "--local-addr=$SHARDLAB_ADDRESS",  # on the network between the nodes; a node's own name may lead to another
        "--rdzv-id=$SHARDLAB_MEETING",  # the job's and this start's own: late ranks of an earlier start are not let in
        *_RANK,
    ]


def _patience(run: Run) -> str:
    """The timeouts of a rendezvous whose nodes may wait for their GPUs, each for its own."""
    if not run.wait_gpus_s:
        return ""
    limit = run.wait_gpus_s + JOIN_S
    return f",join_timeout={limit},read_timeout={limit}"


def _torchrun(run: Run, python: str) -> list[str]:
    return [
        python, "-m", "torch.distributed.run",
        f"--nnodes={run.world.nnodes}",
        f"--nproc-per-node={run.world.nproc_per_node}",
        "--rdzv-backend=c10d",
        "--log-dir=log",  # else each run leaves a folder in /tmp; the ranks' own logs lie beside it
        "--max-restarts=0",  # a restarted rank would be timed as if nothing had happened
    ]  # fmt: skip


LAUNCHER = Launcher(
    name="torchrun",
    summary="PyTorch's launcher: a new process for every rank, rendezvous by c10d",
    rehearsal=False,
    several_nodes=True,
    command=command,
    task=task,
)
