"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients too (2), parameters too (3) are cut over ranks; stage 0 cuts none."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from shardlab.cell import Cell
from shardlab.errors import InputError
from shardlab.registry import Option
from trainers import deepspeed_config, precision, switches
from trainers.communication import Term
from trainers.precision import ALL, dtype_name
from trainers.replicated import ReplicatedEngine
from trainers.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.ranks import Ranks
    from trainers.state_parts import State
    from trainers.workload import Task

FLAGS = 8  # bytes of the gradient's norm and of the sign that a number overflowed, once a step


class ZeroEngine(ReplicatedEngine):
    """DeepSpeed's own engine, driven pass by pass; its bf16 and fp16 keep fp32 weights in the optimizer and cast the model."""

    model: Any  # deepspeed.DeepSpeedEngine

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, stage: int) -> None:
        deepspeed = _deepspeed(ranks)
        super().__init__(cell, task, ranks, model)
        self.scaler = None  # DeepSpeed has its own
        self.stage = stage
        # Before they are cut: each parameter's elements, and which parameter a pass needs when.
        self._sizes = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        self._uses = _uses(model)
        divisible = 2 * ranks.world_size  # what DeepSpeed cannot cut so travels unquantised
        self._matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p.numel() % divisible == 0)
        self.config = deepspeed_config.make(cell, stage, elements=self.parameters(), pin_memory=ranks.device.type == "cuda")
        low = precision.low_dtype(cell.precision)
        drawn = {name: p.detach().clone() for name, p in model.named_parameters()} if low else {}
        self.model, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=self.config)
        self._start_from(drawn)

    def _start_from(self, drawn: dict[str, torch.Tensor]) -> None:
        """Give the optimizer the weights as they were drawn: DeepSpeed's fp32 weights are those it had rounded before."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
        from torch.nn.functional import pad

        own = self._own_weights()
        for name, parameter in self.model.module.named_parameters():
            if name in drawn and self.stage == 3:
                # Its own way to set a whole parameter fails where one does not divide among the ranks.
                whole = drawn[name].flatten()
                parts = pad(whole, (0, -whole.numel() % self.data_ranks)).chunk(self.data_ranks)
                safe_set_local_fp32_param(parameter, parts[self.data_rank])
            elif name in drawn and self.stage:
                safe_set_full_fp32_param(parameter, drawn[name])
            elif name in drawn:
                own[parameter].detach().copy_(drawn[name])

    def _own_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """The fp32 weights behind each of the model's in 16 bits, where nothing is cut."""
        optimizer = self.model.optimizer
        low, full = (getattr(optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
        return {p: weight for many, weights in zip(low, full) for p, weight in zip(many, weights)} if self.stage == 0 else {}

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()  # DeepSpeed has cast the model itself

    def backward(self, loss: torch.Tensor) -> None:
        if self.stage == 0 and self.cell.precision == "fp16":
            # Without ZeRO, DeepSpeed 0.19 divides gradients by the loss scale in step and multiplies by it nowhere.
            loss = loss * self._scaling().cur_scale
        self.model.backward(loss, scale_wrt_gas=False)  # it is a share of the step's loss already

    def update(self) -> None:
        self.model.step()

    def gradient_norm(self) -> float:
        import torch
        from deepspeed.utils import safe_get_full_grad

        squares = [safe_get_full_grad(p).float().square().sum() for p in self.model.module.parameters()]
        return float(torch.stack(squares).sum().sqrt()) / (self._scaling().cur_scale if self.cell.precision == "fp16" else 1.0)

    def _scaling(self) -> Any:
        """What holds the loss scale of an fp16 run as `cur_scale`: gradients are as large as it until the step."""
        optimizer = self.model.optimizer
        return optimizer.loss_scaler if self.stage else optimizer.loss_scale_config

    def start_loss_scale(self, scale: float) -> None:
        if self.cell.precision == "fp16":
            self._scaling().cur_scale = scale

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        found, own = {}, self._own_weights()
        for name, parameter in self.model.module.named_parameters():
            whole = safe_get_full_fp32_param(parameter) if self.stage else own.get(parameter)
            found[switches.plain_name(name)] = (parameter if whole is None else whole).detach().float().cpu().clone()
        return found

    def keeps(self) -> dict[str, list[torch.Tensor]]:
        found, zero = super().keeps(), self.model.optimizer
        averaged = getattr(zero, "averaged_gradients", {}).values()
        found["gradient"] += [gradient for group in averaged for gradient in group or () if gradient is not None]
        if self.stage == 3:
            parameters = list(self.model.module.parameters())
            if zero.grad_partitions_flat_buffer is not None:
                found["gradient"].append(zero.grad_partitions_flat_buffer)
            found["master_parameter"] += zero.fp32_partitioned_groups_flat
            found["parameter"] = [p.ds_tensor for p in parameters]
            found["gathered"] = [p.data for p in parameters]
            # Before gradients, which for a while are views of it.
            found = {"buffer": [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None], **found}
        return found

    def state(self) -> State:
        from trainers import state_parts, zero_state

        return {**zero_state.parts(self.model, self.optimizer, self._sizes), **state_parts.of_buffers(self.model.module)}

    def make_room(self, numbers: dict[str, float]) -> None:
        from trainers import zero_state

        zero_state.make_room(self.model, self.optimizer)

    def restored(self, numbers: dict[str, float]) -> None:
        from trainers import zero_state

        zero_state.restored(self.model)

    def parameters(self) -> int:
        return sum(self._sizes.values())  # what is cut has no size of its own

    def theory(self) -> list[Term]:
        """ZeRO++'s integers are as DeepSpeed 0.19's source has them, the scales beside them (under 1 %) left out; nobody has
        counted them: they need GPUs."""
        n, elements, passes = self.data_ranks, self.parameters(), self.cell.gradient_accumulation_steps
        weight = precision.computed_bytes(self.cell.precision)
        reduced = elements * (2 if self.config["communication_data_type"] == "bf16" else 4)
        if self.stage == 0:
            return [Term("gradients, once a step", "all_reduce", reduced, n)]
        flags = Term("gradient norm and overflow, once a step", "all_reduce", FLAGS, n)
        if self.stage < 3:
            # DeepSpeed reduces whole buckets to every rank at stage 2 as well, which textbooks count as a reduce-scatter.
            times, when = (passes, "each pass") if self.stage == 2 else (1, "once a step")
            gradients = Term(f"gradients, whole buckets to every rank, {when}", "all_reduce", reduced, n, times)
            return [gradients, Term("updated parameters, once a step", "all_gather", elements * weight, n), flags]
        fetched, kept = self._fetched()
        again, hpz = fetched * passes - (elements - kept), self._zero("zero_hpz_partition_size")
        near, travels = hpz if hpz > 1 else n, 1 if self._zero("zero_quantized_weights") else weight
        return [
            Term("cut parameters, once a step", "all_gather", (elements - kept) * travels, n),
            Term("those again, as often as a pass needs one that was freed", "all_gather", again * travels, near),
            Term("parameters too small to be cut, once a step", "all_gather", kept * weight, n),
            *self._gradients(reduced / elements),
            flags,
        ]

    def _gradients(self, itemsize: float) -> list[Term]:
        """Of stage 3. Quantised are those of matrices: half a byte an element, summed within a node, then between nodes."""
        passes, nodes = self.cell.gradient_accumulation_steps, self.cell.nnodes
        coarse = self._matrices if self._zero("zero_quantized_gradients") else 0
        whole = (self.parameters() - coarse) * itemsize
        terms = [Term("gradients, each pass", "reduce_scatter", whole, self.data_ranks, passes)]
        if coarse:
            near = self.data_ranks // nodes
            terms += [
                Term("matrices' gradients in 4 bits within a node, each pass", "all_to_all", coarse / 2, near, passes),
                Term("their sums in 4 bits between nodes, each pass", "all_to_all", coarse / 2 / near, nodes, passes),
            ]
        return terms

    def _fetched(self) -> tuple[int, int]:
        """(elements that a pass gathers, each as often as it does; elements that are not cut).

        After a use a parameter is freed unless it is needed again within max_reuse_distance elements: with DeepSpeed's
        own 10^9 a model of less than half of that is gathered once a pass and then kept, which is less to send and more
        to hold than textbooks say.
        """
        threshold, distance = (self._zero(f"stage3_{name}") for name in ("param_persistence_threshold", "max_reuse_distance"))
        fetched, passed = 0, 0
        used: dict[int, int] = {}  # parameter -> elements that had been used when it last was
        for parameter in self._uses:
            size = self._sizes[parameter]
            if size > threshold and (parameter not in used or passed - used[parameter] >= distance):
                fetched += size
            passed += size
            used[parameter] = passed
        return fetched, sum(size for size in self._sizes.values() if size <= threshold)

    def _zero(self, name: str) -> Any:
        return self.config["zero_optimization"][name]

    def textbook_bytes(self) -> float:
        return (3 if self.stage == 3 else 2) * float(precision.weight_bytes(self.cell.precision)) * self.parameters()

    def effective(self) -> dict[str, Any]:
        engine = self.model
        zero = engine._config.zero_config
        read: dict[str, Any] = {
            **super().effective(),
            "zero_stage": int(engine.zero_optimization_stage()),
            "deepspeed_optimizer": type(engine.optimizer).__name__,
            "max_grad_norm": engine.gradient_clipping() or None,
            "gradients_reduced_as": dtype_name(engine.communication_data_type),
            "gradients_added_up_as": dtype_name(engine.get_data_types()[1]),
        }
        if self.cell.precision == "fp16":
            read |= {"loss_scale": self._scaling().cur_scale, "skipped_steps": engine.skipped_steps}
        if self.stage:
            read |= {
                "reduce_bucket_size": getattr(engine.optimizer, "reduce_bucket_size", None),
                "overlap_comm": bool(getattr(engine.optimizer, "overlap_comm", self.stage == 3 and zero.overlap_comm)),
                "offload_optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
            }
        if self.stage == 3:
            parameters = list(engine.module.parameters())
            read |= {
                "uncut_parameters": sum(p.ds_numel for p in parameters if p.ds_persist),
                "shard_parameters": sum(p.ds_tensor.numel() for p in parameters),
                "offload_param": zero.offload_param.device if zero.offload_param else "none",
                "max_reuse_distance": zero.max_reuse_distance,
                "hpz_partition_size": parameters[0].ds_secondary_tensor_group_size if zero.zero_hpz_partition_size > 1 else 1,
                "quantized_weights": zero.zero_quantized_weights,
                "quantized_gradients": zero.zero_quantized_gradients,
            }
        return read


def _uses(model: nn.Module) -> list[int]:
    """The parameters (by id) in the order in which forward and backward of a pass need them, tied ones once for each module.

    Modules are taken in the order in which the model names them, then backwards. A checkpointed block is computed again
    before its backward, up to its last module, whose inputs are all that backward lacks.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_of = {id(module): wrapper for wrapper in wrappers for module in wrapper.modules()}

    def own(module: nn.Module) -> list[int]:
        return [id(p) for p in module.parameters(recurse=False) if p.requires_grad]

    users = [module for module in model.modules() if own(module)]
    order = list(users)
    again: nn.Module | None = None
    for module in reversed(users):
        wrapper = wrapper_of.get(id(module))
        if wrapper is not None and wrapper is not again:
            order += [inner for inner in wrapper.modules() if own(inner) and inner is not module]
        again = wrapper
        order.append(module)
    return [parameter for module in order for parameter in own(module)]


def _deepspeed(ranks: Ranks) -> Any:
    """DeepSpeed on this rank's device, over the process group that the rank has joined already."""
    os.environ["DS_ACCELERATOR"] = ranks.device.type  # it would guess, aloud
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # it insists on it, one process or many
    import deepspeed

    if ranks.device.type == "cpu":
        # It would compile an operation that only inference uses, for a minute, on the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=ranks.backend, auto_mpi_discovery=False)
    return deepspeed


def refuser(stage: int) -> Callable[[Cell], str | None]:
    """What says why a cell cannot be had at a stage."""

    def refuse(cell: Cell) -> str | None:
        options = cell.options
        if cell.precision == "fp16" and cell.launcher == "fork":
            return "DeepSpeed's fp16 needs a GPU: ranks that are forked have none. Allowed: bf16."
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            size = options.get(name)
            if size is not None and (type(size) is not int or size < 1):
                return f"{name}: found {size!r}. Allowed: a number of elements from 1, or null for the model's size."
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_reuse_distance", "max_live_parameters"):
            if isinstance(size := options.get(name, 0), int) and size < 0:
                return f"{name}: found {size}. Allowed: a number of elements from 0."
        if options.get("communication_dtype", "fp32") != "fp32" and cell.precision not in ("bf16", "bf16-pure"):
            return f"communication_dtype: found bf16 in an {cell.precision} run. Allowed: fp32."
        bucketed = options.get("reduce_bucket_size") is not None or options.get("overlap_comm") is True
        if stage == 1 and cell.precision == "bf16" and bucketed and options["offload_optimizer"] == "none":
            return (
                "stage 1 in bf16 that adds gradients up in fp32 is done by DeepSpeed's BF16_Optimizer, which honours neither "
                "reduce_bucket_size nor overlap_comm. Allowed: leave both out, or zero2."
            )
        return _zeropp(cell) or _offload(cell)

    return refuse


def _zeropp(cell: Cell) -> str | None:
    size = cell.options.get("hpz_partition_size", 1)
    if isinstance(size, int) and (size < 1 or cell.gpus % size):
        return f"hpz_partition_size: found {size} on {cell.gpus} ranks. Allowed: a divisor of the ranks; 1 for none."
    if cell.options.get("quantized_gradients") is True and cell.nnodes == 1:
        return "quantized_gradients: DeepSpeed quantises only what travels between nodes: found nnodes: 1. Allowed: false."
    if cell.launcher == "fork" and (found := _quantized(cell)):
        return f"{found}: DeepSpeed's quantiser needs a GPU, and ranks that are forked have none. Allowed: false."
    return None


def _quantized(cell: Cell) -> str:
    """The options that make what travels coarser, or nothing."""
    return " and ".join(name for name in ("quantized_weights", "quantized_gradients") if cell.options.get(name) is True)


def unprovable(cell: Cell) -> str | None:
    """Why a cell is not held against one process: ZeRO++'s quantisers round to 255 or 15 steps of each group's largest."""
    if found := _quantized(cell):
        return f"{found}: ZeRO++ rounds what travels to integers of 8 or 4 bits, which no tolerance for its precision covers"
    return None


def _offload(cell: Cell) -> str | None:
    where = {name: cell.options.get(name, "none") for name in ("offload_optimizer", "offload_param")}
    path = cell.options.get("nvme_path")
    if "nvme" not in where.values():
        return None if path is None else "nvme_path: found without anything that is offloaded to nvme."
    if not (isinstance(path, str) and path.startswith("/")):
        return f"offloading to nvme needs nvme_path, an absolute path on each node: found {path!r}."
    if cell.instruments.checkpoints is not None:
        return "instruments.checkpoints: what is offloaded to nvme is not saved. Allowed: leave it out, or offload to cpu."
    if cell.launcher == "fork":
        return "offloading to nvme needs a GPU beside the disk: ranks that are forked have none. Allowed: cpu."
    return None


def builder(stage: int) -> Callable[[Cell, Task, Ranks], ZeroEngine]:
    """What builds the engine of a stage."""

    def build(cell: Cell, task: Task, ranks: Ranks) -> ZeroEngine:
        if ranks.device.type == "cpu" and "nvme" in cell.options.values():
            raise InputError("offloading to nvme needs a GPU beside the disk, and this rank has none. Allowed: cpu.")
        if ranks.device.type == "cpu" and cell.precision == "fp16":  # which DeepSpeed leaves to what the CPU can do
            raise InputError("DeepSpeed's fp16 needs a GPU, and this rank has none. Allowed: bf16.")
        if ranks.device.type == "cpu" and (found := _quantized(cell)):
            raise InputError(f"{found}: DeepSpeed's quantiser needs a GPU, and this rank has none. Allowed: false.")
        weights = precision.weight_dtype(cell.precision)
        model = switches.checkpoint_and_compile(cell, task, task.model().to(ranks.device, weights))
        return ZeroEngine(cell, task, ranks, model, stage)

    return build


COMMUNICATION = Option(
    "communication_dtype", "fp32", "how gradients travel in a bf16 run; DeepSpeed's own choice is bf16", ("fp32", "bf16")
)
BUCKET = Option("reduce_bucket_size", None, "elements; null: the model's, at most DeepSpeed's own 500 million")
CUT = (
    COMMUNICATION,
    BUCKET,
    Option("allgather_bucket_size", None, "elements; null as above"),
    Option("overlap_comm", False, "reduce gradients while backward still runs"),
    Option("offload_optimizer", "none", "where optimizer state is kept and updated", ("none", "cpu")),
)
ALL_CUT = (
    COMMUNICATION,
    BUCKET,
    Option("overlap_comm", True, "reduce gradients while backward still runs"),
    Option("prefetch_bucket_size", 50_000_000, "elements that are gathered ahead of use"),
    Option("param_persistence_threshold", 100_000, "parameters of at most so many elements are not cut"),
    Option("max_reuse_distance", 1_000_000_000, "a parameter needed again within so many elements is kept; 0: none is"),
    Option("max_live_parameters", 1_000_000_000, "elements gathered at a time, beyond which nothing is gathered ahead"),
    Option("offload_optimizer", "none", "where optimizer state is kept; updated on the CPU", ("none", "cpu", "nvme")),
    Option("offload_param", "none", "where cut parameters are kept", ("none", "cpu", "nvme")),
    Option("nvme_path", None, "a folder on a local disk of each node"),
    Option("hpz_partition_size", 1, "ranks that hold a second copy together, for what a step gathers again; 1: none (ZeRO++)"),
    Option("quantized_weights", False, "parameters travel as 8-bit integers (ZeRO++)"),
    Option("quantized_gradients", False, "gradients travel as 4-bit integers (ZeRO++)"),
)
CUTS = ("", "parameter", "gradient", "optimizer_state")  # the last so many as the stage says
HONOURED = ("activation_checkpointing", "max_grad_norm")


def _variant(stage: int, summary: str, options: tuple[Option, ...]) -> Strategy:
    return Strategy(
        name=f"zero{stage}",
        summary=summary,
        precisions=ALL if stage else precision.MIXED,
        reasons={} if stage else {"bf16-pure": "without ZeRO, DeepSpeed keeps fp32 weights behind those in bf16"},
        refuse=refuser(stage),
        build=builder(stage),
        options=options,
        switches=HONOURED,
        cuts=CUTS[4 - stage :],
        unprovable=unprovable,
    )


VARIANTS = (
    _variant(0, "a whole model on every rank, driven by DeepSpeed: what its ZeRO stages are compared with", (COMMUNICATION,)),
    _variant(1, "optimizer state cut over the ranks (DeepSpeed ZeRO stage 1)", CUT),
    _variant(2, "optimizer state and gradients cut over the ranks (DeepSpeed ZeRO stage 2)", CUT),
    _variant(3, "optimizer state, gradients and parameters cut over the ranks (DeepSpeed ZeRO stage 3)", ALL_CUT),
)
