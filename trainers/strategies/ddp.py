"""DistributedDataParallel: a whole model on every rank, gradients averaged in buckets while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardlab.cell import Cell
from shardlab.errors import InputError
from shardlab.registry import Option
from trainers import switches
from trainers.communication import Term, bytes_of
from trainers.precision import ALL, scales_loss, weight_dtype
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel

    from trainers.ranks import Ranks
    from trainers.saving.state_parts import State
    from trainers.workload import Task

E = TypeVar("E", bound="DdpEngine")
MIB = 2**20
MOST_MIB = 2**43 - 1  # torch counts a bucket's bytes in 64 bits
WITHOUT_GPU = "torch supports SyncBatchNorm on GPUs only, and the ranks of this run compute on a CPU. Allowed: false."


RANK = 1  # of PowerSGD's approximation
WORTH = 2  # PowerSGD compresses a matrix that becomes smaller by more than this factor
EXACT_STEPS = 2  # before PowerSGD starts; its own least number with error feedback


class DdpEngine(ReplicatedEngine):
    hook = "none"  # how gradients are compressed before they are sent

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        wrapped = cast("DistributedDataParallel", self.model)
        return nullcontext() if last else wrapped.no_sync()

    @contextmanager
    def join(self) -> Iterator[None]:
        """The context of a step in which some ranks have no data. A rank without data takes part in the collectives of the
        other ranks. Gradients are averaged over the ranks with data. At the end all ranks get the parameters of one of them."""
        from torch.distributed.algorithms.join import _JoinConfig

        wrapped = cast("DistributedDataParallel", self.model)
        with wrapped.join(divide_by_initial_world_size=False):
            yield
        wrapped._join_config = _JoinConfig(
            enable=False, throw_on_early_termination=False, is_first_joinable=False
        )  # torch leaves it on, and validation may follow

    def theory(self) -> list[Term]:
        n, psi = self.data_ranks, bytes_of(self.model.parameters(), 2 if self.hook == "bf16" else None)
        held = bytes_of(self.model.buffers())
        buffers = [Term("buffers (BatchNorm's statistics), rank 0's to all, once a step", "broadcast", held, n)] if held else []
        if self.hook == "powersgd":
            vectors, factors = _powersgd(self.model)
            return [
                Term("gradients that are not worth compressing", "all_reduce", vectors, n),
                Term(f"both factors of rank {RANK} of the others, once its {EXACT_STEPS} exact steps are over", "all_reduce",
                     factors, n),
                *buffers,
            ]  # fmt: skip
        return [Term("gradients, all buckets of a step together: 2 (n-1)/n psi", "all_reduce", psi, n), *buffers]

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
            "static_graph": cast("DistributedDataParallel", self.model).static_graph,
            "gradient_as_bucket_view": cast("DistributedDataParallel", self.model).gradient_as_bucket_view,
            "comm_hook": logged.get("comm_hook") or "none",
            "joined": bool(logged.get("join_uneven_inputs")),
        }


class PowerSgdEngine(DdpEngine):
    """DDP with PowerSGD, which keeps its state per bucket. DDP decides its buckets only in its first steps."""

    kept: PowerSGDState
    hook = "powersgd"

    def state(self) -> State:
        from trainers.saving.state_parts import Part

        found = super().state()
        for name in ("error", "p_memory", "q_memory"):
            for bucket, tensor in getattr(self.kept, f"{name}_dict").items():
                found[f"powersgd/{name}/{bucket}"] = Part(tensor, tensor.shape, (0,), own=True)
        return found

    def numbers(self) -> dict[str, float]:
        return {**super().numbers(), "powersgd_iterations": float(self.kept.iter)}

    def make_room(self, numbers: dict[str, float]) -> None:
        """Make steps on one item and discard the gradients, until DDP has its buckets and PowerSGD the memory of its state."""
        import numpy as np

        from trainers.instruments.timing import clock_for

        super().make_room(numbers)
        clock = clock_for(self.device)
        clock.start()
        some = self.task.fetch(np.zeros(self.cell.micro_batch_size, dtype=np.int64), self.device)
        for _ in range(EXACT_STEPS + (numbers.get("powersgd_iterations", 0) > EXACT_STEPS)):
            self.forward_backward([some], clock)
            self.optimizer.zero_grad(set_to_none=True)

    def restored(self, numbers: dict[str, float]) -> None:
        super().restored(numbers)
        self.kept.iter = int(numbers.get("powersgd_iterations", 0))  # 0 if the checkpoint is of another strategy


def _powersgd(model: nn.Module) -> tuple[int, int]:
    """Bytes of the gradients that PowerSGD (Vogels et al., 2019) does not compress, and of the two factors of all others.

    A gradient with r rows is an r x c matrix for PowerSGD; its two factors together have RANK (r + c) elements.
    """
    whole = factors = 0
    for parameter in model.parameters():
        rows = parameter.shape[0] if parameter.dim() > 1 else 0
        small = RANK * (rows + parameter.numel() // rows) if rows else 0
        if small and small * WORTH < parameter.numel():
            factors += small * parameter.element_size()
        else:
            whole += parameter.numel() * parameter.element_size()
    return whole, factors


def refuse(cell: Cell) -> str | None:
    if cell.options.get("comm_hook", "none") == "bf16" and cell.precision not in ("bf16", "bf16-autocast"):
        return (
            f"comm_hook: found bf16 with precision {cell.precision}; the hook is only for the fp32 gradients of bf16 and "
            "bf16-autocast. Allowed: none."
        )
    if cell.options["sync_batch_norm"] is True and cell.launcher == "fork":
        return f"sync_batch_norm: {WITHOUT_GPU}"
    if cell.options.get("static_graph") is True and cell.gradient_accumulation_steps > 1:
        return (
            "static_graph: torch records the graph in the first pass, and this pass must exchange gradients. "
            "Allowed: gradient_accumulation_steps of 1, or false."
        )
    if cell.options.get("join") is True and (why := _join(cell)) is not None:
        return why
    return None


def _join(cell: Cell) -> str | None:
    if cell.epochs != 1:
        found = f"steps: {cell.steps}" if cell.epochs is None else f"epochs: {cell.epochs}"
        return (
            "join: a rank without data makes no optimizer step in the short step, so no other step may follow: "
            f"found {found}. Allowed: epochs: 1."
        )
    if cell.options.get("comm_hook", "none") != "none" or cell.options.get("static_graph") is True:
        return "join: torch's join supports neither comm_hook nor static_graph. Allowed: leave both out, or join: false."
    return None


def build(cell: Cell, task: Task, ranks: Ranks) -> DdpEngine:
    return _wrapped(cell, task, ranks, DdpEngine)


def _wrapped(cell: Cell, task: Task, ranks: Ranks, kind: type[E]) -> E:
    from torch.nn import SyncBatchNorm
    from torch.nn.parallel import DistributedDataParallel

    model = task.model().to(ranks.device, weight_dtype(cell.precision))
    if cell.options["sync_batch_norm"]:
        if ranks.device.type == "cpu":
            raise InputError(f"sync_batch_norm: {WITHOUT_GPU}")
        model = SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(
        switches.checkpoint_and_compile(cell, task, model),
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=cast("int", cell.options["bucket_cap_mb"]),
        static_graph=cast("bool", cell.options["static_graph"]),
        gradient_as_bucket_view=cast("bool", cell.options["gradient_as_bucket_view"]),
    )
    engine = kind(cell, task, ranks, wrapped)
    engine.joins = cell.options.get("join") is True
    if cell.options.get("comm_hook", "none") == "bf16":
        wrapped.register_comm_hook(ranks.world_size, _in_bf16)
        engine.hook = "bf16"
    return engine


def _in_bf16(world_size, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own classes as annotations or none
    """Average a bucket in bf16. torch's own hook does the same but refuses to on a CPU."""
    import torch
    import torch.distributed as dist

    rounded = bucket.buffer().to(torch.bfloat16).div_(world_size)
    sent = dist.all_reduce(rounded, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def build_powersgd(cell: Cell, task: Task, ranks: Ranks) -> PowerSgdEngine:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    engine = _wrapped(cell, task, ranks, PowerSgdEngine)
    engine.kept = state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=EXACT_STEPS,
        min_compression_rate=WORTH,
        use_error_feedback=True,
        warm_start=True,
        orthogonalization_epsilon=0,
        random_seed=cell.seed,
        batch_tensors_with_same_shape=False,
    )
    cast("DistributedDataParallel", engine.model).register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return engine


OPTIONS = (
    Option("bucket_cap_mb", 25, "approximate size of a gradient bucket, in MiB", least=1, most=MOST_MIB),
    Option("static_graph", False, "tell DDP that every step uses the same parameters in the same order"),
    Option("sync_batch_norm", False, "compute BatchNorm's statistics over the micro-batches of all ranks together"),
    Option("gradient_as_bucket_view", True, "store gradients in the buckets themselves, without copies into and out of them"),
)
VARIANTS = (
    Strategy(
        name="ddp",
        summary="a whole model on every rank, gradients averaged by all-reduce (PyTorch DistributedDataParallel)",
        precisions=ALL,
        refuse=refuse,
        build=build,
        switches=switches.ALL,
        cuts=(),
        options=(
            *OPTIONS,
            Option("comm_hook", "none", "round gradients to this dtype before they are sent", ("none", "bf16")),
            Option("join", False, "train also on the items left at the end of the epoch, on as many ranks as they fill"),
        ),
    ),
    Strategy(
        name="ddp-powersgd",
        summary=f"DDP with gradients compressed to matrices of rank {RANK}, with error feedback (PowerSGD)",
        precisions=tuple(name for name in ALL if not scales_loss(name)),
        reasons=dict.fromkeys(
            filter(scales_loss, ALL), "the compression error of a step is added to the next gradient, even after an overflow"
        ),
        refuse=refuse,
        build=build_powersgd,
        switches=switches.ALL,
        cuts=(),
        options=OPTIONS,
        other_work=lambda _: "PowerSGD approximates gradients, so its computation differs from that of one process",
        communication_period=lambda _: None,  # the second of its two all-reduces starts in a callback of the first one
    ),
)
