"""DistributedDataParallel: a whole model on every rank, gradients averaged in buckets while backward still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell
from shardlab.registry import Option
from trainers import switches
from trainers.communication import Term, bytes_of
from trainers.precision import MIXED
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from trainers.ranks import Ranks
    from trainers.workload import Task

MIB = 2**20


class DdpEngine(ReplicatedEngine):
    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        wrapped = cast("DistributedDataParallel", self.model)
        return nullcontext() if last else wrapped.no_sync()

    def theory(self) -> list[Term]:
        psi = bytes_of(self.model.parameters())
        return [Term("gradients, all buckets of a step together: 2 (n-1)/n psi", "all_reduce", psi, self.data_ranks)]

    def textbook_bytes(self) -> float:
        return 2.0 * bytes_of(self.model.parameters())

    def effective(self) -> dict[str, Any]:
        logged = cast("DistributedDataParallel", self.model)._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        buckets = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]  # rebuilt after the first step
        return {
            **super().effective(),
            "bucket_cap_mb": logged["bucket_cap_bytes"] / MIB,
            "bucket_sizes_bytes": [int(size) for size in buckets.split(",")],
            "backend": logged["backend_name"],
        }


def refuse(cell: Cell) -> str | None:
    cap = cell.options.get("bucket_cap_mb", 25)
    if isinstance(cap, int) and cap < 1:
        return f"bucket_cap_mb: found {cap}. Allowed: a number of MiB from 1."
    return None


def build(cell: Cell, task: Task, ranks: Ranks) -> DdpEngine:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        switches.checkpoint_and_compile(cell, task, task.model().to(ranks.device)),
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=cast("int", cell.options.get("bucket_cap_mb", 25)),
    )
    return DdpEngine(cell, task, ranks, wrapped)


VARIANTS = (
    Strategy(
        name="ddp",
        summary="a whole model on every rank, gradients averaged by all-reduce (PyTorch DistributedDataParallel)",
        precisions=MIXED,
        refuse=refuse,
        build=build,
        switches=switches.ALL,
        options=(Option("bucket_cap_mb", 25, "gradients are exchanged in buckets of about so many MiB"),),
    ),
)
