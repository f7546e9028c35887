"""The engines of DistributedDataParallel, without and with PowerSGD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.checkpointing.state_parts import TensorPart
from trainers.communication import bytes_of
from trainers.dtypes import weight_dtype
from trainers.instruments.timing import make_clock
from trainers.replicated import ReplicatedEngine
from trainers.strategies.ddp import WITHOUT_GPU
from trainers.strategy_options import DdpOptions
from trainers.theory.term import ModelPart, Term
from trainers.theory.whole_models import EXACT_STEPS, POWERSGD_RANK, list_ddp_terms, list_powersgd_terms

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    from trainers.checkpointing.state_parts import State
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


E = TypeVar("E", bound="DdpEngine")
MIB = 2**20
MIN_COMPRESSION = 2  # PowerSGD compresses a matrix only if the matrix becomes smaller by more than this factor


class DdpEngine(ReplicatedEngine):
    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        ddp_model = cast("DistributedDataParallel", self.model)
        return nullcontext() if last else ddp_model.no_sync()

    @contextmanager
    def join_short_step(self) -> Iterator[None]:
        """The context of a step in which some ranks have no data.

        A rank without data takes part in the collectives of the other ranks. Gradients are averaged over the ranks with data.
        At the end, all ranks get the parameters of one rank with data.
        """
        ddp_model = cast("DistributedDataParallel", self.model)
        with ddp_model.join(divide_by_initial_world_size=False):
            yield
        # torch itself does not switch `join` off after the step, and a validation may follow
        ddp_model._join_config = _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)

    def theory(self) -> list[Term]:
        return list_ddp_terms(self.cell, self.make_model_part())

    def make_model_part(self) -> ModelPart:
        """The sizes on which the theory depends."""
        elements = sum(p.numel() for p in self.model.parameters())
        return ModelPart(elements=elements, buffer_bytes=bytes_of(self.model.buffers()))

    def compute_textbook_bytes(self) -> float:
        return 2.0 * bytes_of(self.model.parameters())

    def effective(self) -> dict[str, Any]:
        log_data = cast("DistributedDataParallel", self.model)._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        buckets = log_data.get("rebuilt_bucket_sizes") or log_data["bucket_sizes"]  # DDP makes new buckets after the first step
        return {
            **super().effective(),
            "bucket_cap_mb": log_data["bucket_cap_bytes"] / MIB,
            "bucket_sizes_bytes": [int(size) for size in buckets.split(",")],
            "backend": log_data["backend_name"],
            "static_graph": cast("DistributedDataParallel", self.model).static_graph,
            "gradient_as_bucket_view": cast("DistributedDataParallel", self.model).gradient_as_bucket_view,
            "comm_hook": log_data.get("comm_hook") or "none",
            "joined": bool(log_data.get("join_uneven_inputs")),
        }


class PowerSgdEngine(DdpEngine):
    """DDP with PowerSGD. PowerSGD has a state for each bucket of gradients, and DDP chooses the buckets only in its first
    steps."""

    powersgd_state: PowerSGDState

    def theory(self) -> list[Term]:
        model_part = msgspec.structs.replace(self.make_model_part(), powersgd_bytes=_count_powersgd_bytes(self.model))
        return cast("list[Term]", list_powersgd_terms(self.cell, model_part))

    def make_state_parts(self) -> State:
        parts = super().make_state_parts()
        for name in ("error", "p_memory", "q_memory"):
            for bucket, tensor in getattr(self.powersgd_state, f"{name}_dict").items():
                parts[f"powersgd/{name}/{bucket}"] = TensorPart(tensor, tensor.shape, (0,), per_rank=True)
        return parts

    def collect_numbers(self) -> dict[str, float]:
        return {**super().collect_numbers(), "powersgd_iterations": float(self.powersgd_state.iter)}

    def allocate_optimizer_state(self, numbers: dict[str, float]) -> None:
        """Make steps on one item without updates, until DDP has chosen its buckets and PowerSGD has allocated its state."""
        super().allocate_optimizer_state(numbers)
        clock = make_clock(self.device)
        clock.start()
        batch = self.task.fetch(np.zeros(self.cell.micro_batch_size, dtype=np.int64), self.device)
        for _ in range(EXACT_STEPS + (numbers.get("powersgd_iterations", 0) > EXACT_STEPS)):
            self.forward_backward([batch], clock)
            self.optimizer.zero_grad(set_to_none=True)

    def finish_loading(self, numbers: dict[str, float]) -> None:
        super().finish_loading(numbers)
        self.powersgd_state.iter = int(numbers.get("powersgd_iterations", 0))  # 0: another strategy saved the checkpoint


def _count_powersgd_bytes(model: nn.Module) -> tuple[int, int]:
    """The bytes that PowerSGD sends: (bytes of the gradients that it does not compress, bytes of the two factors of all other
    gradients).

    PowerSGD (Vogels et al., 2019) treats a gradient with r rows as an r x c matrix. Its two factors have
    POWERSGD_RANK (r + c) elements.
    """
    uncompressed_bytes = factor_bytes = 0
    for parameter in model.parameters():
        row_count = parameter.shape[0] if parameter.dim() > 1 else 0
        factor_elements = POWERSGD_RANK * (row_count + parameter.numel() // row_count) if row_count else 0
        if factor_elements and factor_elements * MIN_COMPRESSION < parameter.numel():
            factor_bytes += factor_elements * parameter.element_size()
        else:
            uncompressed_bytes += parameter.numel() * parameter.element_size()
    return uncompressed_bytes, factor_bytes


def build(cell: Cell, task: Task, ranks: Ranks, *, powersgd: bool = False) -> DdpEngine:
    return _build_with_powersgd(cell, task, ranks) if powersgd else _build_wrapped(cell, task, ranks, DdpEngine)


def _build_wrapped(cell: Cell, task: Task, ranks: Ranks, engine_class: type[E]) -> E:
    options, model = DdpOptions(cell.options), task.model().to(ranks.device, weight_dtype(cell.precision))
    if options.sync_batch_norm:
        if ranks.device.type == "cpu":
            raise InputError(f"sync_batch_norm: {WITHOUT_GPU}")
        model = SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    ddp_model = DistributedDataParallel(
        model_options.checkpoint_and_compile(cell, task, model),
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )
    engine = engine_class(cell, task, ranks, ddp_model)
    engine.has_short_steps = options.join
    if options.comm_hook == "bf16":
        ddp_model.register_comm_hook(ranks.world_size, _average_in_bf16)
    return engine


def _average_in_bf16(world_size, bucket):  # type: ignore[no-untyped-def]  # DDP accepts only its own classes as annotations, or none
    """A communication hook of DDP: average a bucket of gradients in bf16. Torch's own hook does the same, but not on a CPU."""
    rounded_bucket = bucket.buffer().to(torch.bfloat16).div_(world_size)
    pending_reduction = dist.all_reduce(rounded_bucket, async_op=True).get_future()
    return pending_reduction.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def _build_with_powersgd(cell: Cell, task: Task, ranks: Ranks) -> PowerSgdEngine:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # it imports modules that only PowerSGD needs

    engine = _build_wrapped(cell, task, ranks, PowerSgdEngine)
    engine.powersgd_state = powersgd_state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=EXACT_STEPS,
        min_compression_rate=MIN_COMPRESSION,
        use_error_feedback=True,
        warm_start=True,
        orthogonalization_epsilon=0,
        random_seed=cell.seed,
        batch_tensors_with_same_shape=False,
    )
    cast("DistributedDataParallel", engine.model).register_comm_hook(powersgd_state, powerSGD_hook.powerSGD_hook)
    return engine
