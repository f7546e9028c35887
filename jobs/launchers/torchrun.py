"""The launcher `torchrun`, which is PyTorch's own launcher: starts a new process for every rank. Rendezvous backend: c10d."""

from __future__ import annotations

from jobs.launcher import Launcher, list_launcher_options, make_rank_argv
from shardlab.runs.run import Run

JOIN_ALLOWANCE_S = 600  # seconds that torchrun itself allows until all nodes have joined the rendezvous


def make_node_argv(run: Run, python: str) -> list[str]:
    """The argv that starts all ranks of a run on this node."""
    return [
        *_make_torchrun_argv(run, python),
        "--rdzv-endpoint=127.0.0.1:0",  # port 0: torchrun takes a free port, so that two runs never use the same rendezvous
        "--local-addr=127.0.0.1",  # so that it does not matter whether the name of this machine can be resolved
        f"--rdzv-id={run.run_id}",
        *make_rank_argv(run),
    ]


def make_task_argv(run: Run, python: str) -> list[str]:
    """The argv that starts the ranks of one node in a job step over several nodes."""
    return [
        *_make_torchrun_argv(run, python),
        "--rdzv-endpoint=$SHARDLAB_RENDEZVOUS",  # address of the job's first node, with a port that was free on that node
        # Without is_host, torchrun compares host names to find the first node, which can go wrong.
        f"--rdzv-conf=is_host=$SHARDLAB_IS_FIRST{_format_join_timeouts(run)}",
        # this node's address in the network between the nodes; its name may resolve to another network
        "--local-addr=$SHARDLAB_ADDRESS",
        # the id differs for each start of each job, so late ranks of an earlier start cannot join
        "--rdzv-id=$SHARDLAB_RENDEZVOUS_ID",
        *make_rank_argv(run),
    ]


def _format_join_timeouts(run: Run) -> str:
    """The timeouts of the rendezvous, long enough for nodes that first wait for free GPUs (--wait-gpus); '' for the
    defaults."""
    if not run.wait_gpus_s:
        return ""
    join_timeout_s = run.wait_gpus_s + JOIN_ALLOWANCE_S
    return f",join_timeout={join_timeout_s},read_timeout={join_timeout_s}"


def _make_torchrun_argv(run: Run, python: str) -> list[str]:
    return [
        python, "-m", "torch.distributed.run",
        f"--nnodes={run.world.nnodes}",
        f"--nproc-per-node={run.world.nproc_per_node}",
        "--rdzv-backend=c10d",
        "--log-dir=log",  # without this option, each run would leave a folder in /tmp; the logs of the ranks are in log/ too
        "--max-restarts=0",  # no restarts, because a step during which a rank is restarted would be recorded as a normal step
        *list_launcher_options(run),
    ]  # fmt: skip


LAUNCHER = Launcher(
    name="torchrun",
    summary="PyTorch's launcher: a new process for every rank, rendezvous by c10d",
    several_nodes=True,
    make_node_argv=make_node_argv,
    make_task_argv=make_task_argv,
    takes_options=True,
)
