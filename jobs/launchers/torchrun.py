"""PyTorch's own launcher: a new process for every rank, rendezvous by c10d."""

from __future__ import annotations

from jobs.launcher import Launcher
from shardlab.run import Run


def command(run: Run, python: str) -> list[str]:
    return [
        python, "-m", "torch.distributed.run",
        f"--nnodes={run.world.nnodes}",
        f"--nproc-per-node={run.world.nproc_per_node}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",  # port 0: a free one, so that runs cannot meet each other
        "--local-addr=127.0.0.1",  # the machine's own name need not resolve
        f"--rdzv-id={run.run_id}",
        "--log-dir=log",  # else each run leaves a folder in /tmp; the ranks' own logs lie beside it
        "--max-restarts=0",  # a restarted rank would be timed as if nothing had happened
        "-m", "trainers", "run", ".",
    ]  # fmt: skip


LAUNCHER = Launcher(
    name="torchrun",
    summary="PyTorch's launcher: a new process for every rank, rendezvous by c10d",
    rehearsal=False,
    command=command,
)
