"""Parameter servers: ranks that store the parameters and update them with the gradients that workers push.

The study (paper 3, sections 3.4 and 5.3.1) has three variants: a synchronous one ("all nodes must await completion of the
slowest worker"), an asynchronous one ("workers independently compute and apply parameter updates"), and a modified asynchronous
one that reduces staleness: it has bounded staleness, gradients that are weighted by their age, and an interval between pulls.

Workers are the first ranks, servers the last ranks. Workers therefore have the same numbers as the ranks of every other
strategy: rank 0 trains, and local rank r has GPU r. Servers compute on the CPU and have no GPU.
"""

from __future__ import annotations

from functools import partial

import msgspec

from shardlab.matrix.cell import Cell
from trainers.model.precision import ALL
from trainers.strategy import Strategy
from trainers.strategy_options import AsynchronousOptions, StalenessOptions
from trainers.theory.whole_models import divide_worker, list_worker_terms


def refuse(cell: Cell) -> str | None:
    if cell.optimizer.name != "sgd":
        return f"parameter servers update with SGD (and momentum) only: found optimizer {cell.optimizer.name}. Allowed: sgd."
    if cell.nnodes > 1:
        return f"parameter servers are the last ranks, all on the last node: found nnodes: {cell.nnodes}. Allowed: nnodes: 1."
    return None


# no clipping, because no server knows the norm of the whole gradient
SUPPORTED_SWITCHES = ("activation_checkpointing", "compile")
NO_COMMON_STEP = "workers are at different steps, so the parameters never belong to one step of all workers"
OWN_ORDER = "each worker's gradient is applied on its own, in the order of arrival, so no two runs do the same work"


def explain_unprovable(cell: Cell) -> str:
    """Why an asynchronous server cannot be compared with one process."""
    pull_interval = find_pull_period(cell)
    pull_remark = f"; workers pull parameters once in {pull_interval} pushes, so their own last pushes are missing in them too"
    return OWN_ORDER + (pull_remark if pull_interval != 1 else "")


def find_pull_period(cell: Cell) -> int:
    """The number of steps after which the communication of a worker repeats."""
    return AsynchronousOptions(cell.options).pull_interval


_SYNC = Strategy(
    name="ps-sync",
    summary="parameter servers that wait for all workers and apply the mean gradient",
    precisions=ALL,
    refuse=refuse,
    engine="trainers.engines.parameter_server",
    settings={"waits": True},
    servers=True,
    theory_of_memory=divide_worker,
    theory_of_communication=partial(list_worker_terms, waits=True),
    switches=SUPPORTED_SWITCHES,
)
_ASYNC = msgspec.structs.replace(
    _SYNC,
    name="ps-async",
    summary="parameter servers that apply each worker's gradient at once",
    settings={},
    theory_of_communication=partial(list_worker_terms, waits=False),
    options=AsynchronousOptions.list_options(),
    unprovable=explain_unprovable,
    communication_period=find_pull_period,
    no_checkpoints=NO_COMMON_STEP,
    tolerates_lost_ranks=True,
)
VARIANTS = (
    _SYNC,
    _ASYNC,
    msgspec.structs.replace(
        _ASYNC,
        name="ps-ssp",
        summary="asynchronous parameter servers with bounded staleness; stale gradients get a smaller weight",
        options=(*StalenessOptions.list_options(), *AsynchronousOptions.list_options()),
    ),
)
