"""The engine of ZeRO, which wraps DeepSpeed's own engine, and the bytes that each stage sends by theory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.functional import pad

from shardlab.matrix.cell import Cell
from trainers import dtypes, model_options
from trainers.checkpointing import state_parts
from trainers.communication import Term
from trainers.deepspeed_zero import deepspeed_config, gather_state, zero_state
from trainers.dtypes import dtype_name
from trainers.model import activation_checkpointing, precision
from trainers.replicated import ReplicatedEngine

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.model.deferred_init import Deferred
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task

FLAGS = 8  # bytes of the gradient norm and of the overflow flag, which are all-reduced once per step


class ZeroEngine(ReplicatedEngine):
    """Calls DeepSpeed's engine for each pass and step. With bf16 and fp16, DeepSpeed casts the model to 16 bits and keeps fp32
    weights in its optimizer."""

    casts_itself = True
    model: Any  # deepspeed.DeepSpeedEngine

    def __init__(
        self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, stage: int, deferred: Deferred | None = None
    ) -> None:
        """deferred: the object that fills a model on the meta device, only for stage 3; None: the model is in host memory."""
        _set_up(ranks)
        self.stage = stage
        divisible = 2 * ranks.world_size  # ZeRO++ quantises only parameters whose size is divisible by this number
        self._matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p.numel() % divisible == 0)
        elements = [p.numel() for p in model.parameters() if p.requires_grad]
        self.config = deepspeed_config.make(cell, stage, elements=sum(elements), pin_memory=ranks.device.type == "cuda")
        low = dtypes.cast_dtype(cell.precision)
        if deferred is not None:
            blocks = activation_checkpointing.units(task, model)
            drawn = _build_sharded(model, deferred, blocks, ranks, self.config, low)
        else:
            # DeepSpeed moves this rank's part of the model to the device, at stage 3 one parameter at a time. `drawn` keeps the
            # fp32 weights without a copy, because casting the model allocates new memory for each parameter.
            drawn = {name: p.detach() for name, p in model.named_parameters()} if low else {}
            model.to(low or dtypes.weight_dtype(cell.precision))
        super().__init__(cell, task, ranks, model)
        self.scaler = None  # shardlab's loss scaler is not used, because DeepSpeed has its own
        # The number of elements of each parameter before sharding, because afterwards its size is 0, and the order of use.
        self._sizes = dict(zip((id(p) for p in model.parameters() if p.requires_grad), elements, strict=True))
        self._uses = _list_uses(model)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=self.config)
        self._start_from(drawn, whole=deferred is None)

    def _start_from(self, drawn: dict[str, torch.Tensor], *, whole: bool) -> None:
        """Write the initial fp32 weights into the optimizer. Without this, DeepSpeed's fp32 weights would be the initial
        weights rounded to 16 bits.

        drawn: the initial weights by name. whole: whether `drawn` has whole parameters; if not, it has this rank's parts.
        """
        own = self._own_weights()
        for name, parameter in self.model.module.named_parameters():
            if name in drawn and self.stage == 3:
                # DeepSpeed's function that sets a whole parameter fails if the parameter's size is not divisible by the number
                # of ranks.
                part = _cut_part(drawn[name], self.data_rank, self.data_ranks) if whole else drawn[name]
                safe_set_local_fp32_param(parameter, part.to(self.device))
            elif name in drawn and self.stage:
                safe_set_full_fp32_param(parameter, drawn[name].to(self.device))
            elif name in drawn:
                own[parameter].detach().copy_(drawn[name])

    def _own_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """At stage 0, where nothing is sharded: a dict from each 16-bit weight of the model to its fp32 weight. Empty at other
        stages."""
        optimizer = self.model.optimizer
        low, full = (getattr(optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
        return {p: weight for many, weights in zip(low, full) for p, weight in zip(many, weights)} if self.stage == 0 else {}

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        if self.stage == 0 and self.cell.precision == "fp16":
            # At stage 0, DeepSpeed 0.19 divides gradients by the loss scale in `step`, but it never multiplies the loss by
            # this scale.
            loss = loss * self._scaling().cur_scale
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is already divided by the number of micro-batches

    def update(self) -> None:
        self.model.step()

    def gradient_norm(self) -> float:
        parameters = self.model.module.parameters()
        squares = [gradient.float().square().sum() for gradient in self._whole(parameters, gradients=True)]
        return float(torch.stack(squares).sum().sqrt()) / (self._scaling().cur_scale if self.cell.precision == "fp16" else 1.0)

    def _scaling(self) -> Any:
        """DeepSpeed's object with the loss scale of an fp16 run (`cur_scale`). Gradients stay scaled until the step."""
        optimizer = self.model.optimizer
        return optimizer.loss_scaler if self.stage else optimizer.loss_scale_config

    def start_loss_scale(self, scale: float) -> None:
        if self.cell.precision == "fp16":
            self._scaling().cur_scale = scale

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        names, parameters = zip(*self.model.module.named_parameters(), strict=True)
        whole = self._whole(parameters, gradients=False)
        return {
            model_options.plain_name(name): found.detach().float().cpu().clone()
            for name, found in zip(names, whole, strict=True)
        }

    def _whole(self, parameters: Iterable[nn.Parameter], *, gradients: bool) -> Iterable[torch.Tensor]:
        """The whole weight of each parameter, or its whole gradient, on every rank. A collective."""
        if self.stage:
            return gather_state.whole(parameters, gradients=gradients)
        own = {} if gradients else self._own_weights()
        return (safe_get_full_grad(p) if gradients else own.get(p, p) for p in parameters)

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
            found["gathered"] = parameters  # not p.data: each access makes a tensor, and this method is called at each operator
            # For some time, gradients are views of this buffer. A tensor counts for the first category that has it, so `buffer`
            # must stand before `gradient`.
            found = {"buffer": [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None], **found}
        return found

    def state(self) -> State:
        return {**zero_state.parts(self.model, self.optimizer, self._sizes), **state_parts.of_buffers(self.model.module)}

    def make_room(self, numbers: dict[str, float]) -> None:
        zero_state.make_room(self.model, self.optimizer)

    def restored(self, numbers: dict[str, float]) -> None:
        zero_state.restored(self.model)

    def parameters(self) -> int:
        return sum(self._sizes.values())  # sizes before sharding, because a sharded parameter has the size 0

    def theory(self) -> list[Term]:
        """As `Accounted.theory`. For ZeRO++, the bytes of quantised values are derived from the source of DeepSpeed 0.19,
        without the scales of the quantisation (less than 1 %). They have not yet been compared with counted bytes, which needs
        GPUs."""
        n, elements, passes = self.data_ranks, self.parameters(), self.cell.gradient_accumulation_steps
        weight = precision.computed_bytes(self.cell.precision)
        reduced = elements * (2 if self.config["communication_data_type"] == "bf16" else 4)
        if self.stage == 0:
            return [Term("gradients, once a step", "all_reduce", reduced, n)]
        flags = Term("gradient norm and overflow, once a step", "all_reduce", FLAGS, n)
        if self.stage < 3:
            # Also at stage 2, DeepSpeed all-reduces whole buckets; textbooks assume a reduce-scatter.
            times, when = (passes, "each pass") if self.stage == 2 else (1, "once a step")
            gradients = Term(f"gradients, whole buckets to every rank, {when}", "all_reduce", reduced, n, times)
            return [gradients, Term("updated parameters, once a step", "all_gather", elements * weight, n), flags]
        fetched, kept = self._fetched()
        again, hpz = fetched * passes - (elements - kept), self._zero("zero_hpz_partition_size")
        near, travels = hpz if hpz > 1 else n, 1 if self._zero("zero_quantized_weights") else weight
        return [
            Term("sharded parameters, once a step", "all_gather", (elements - kept) * travels, n),
            Term("sharded parameters again, each time a pass needs a freed one", "all_gather", again * travels, near),
            Term("parameters too small to be sharded, once a step", "all_gather", kept * weight, n),
            *self._gradients(reduced / elements),
            flags,
        ]

    def _gradients(self, itemsize: float) -> list[Term]:
        """The communication of gradients at stage 3. Gradients of matrices may be quantised to half a byte per element; they
        are then summed first within each node and then between nodes. itemsize: bytes per element of other gradients."""
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
        """Two numbers of parameter elements: (elements that a pass gathers, counted each time they are gathered; elements that
        are not sharded).

        After its use a parameter is freed, unless it is needed again within max_reuse_distance elements. DeepSpeed's default
        is 10^9. A model with less than half of this number of elements is therefore gathered once per pass and then kept: it
        sends less and needs more memory than textbooks say.
        """
        threshold, distance = (self._zero(f"stage3_{name}") for name in ("param_persistence_threshold", "max_reuse_distance"))
        fetched, passed = 0, 0
        used: dict[int, int] = {}  # id of a parameter -> number of elements that were used up to the last use of the parameter
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


def has_quantiser() -> bool:
    """Whether DeepSpeed was installed with its compiled quantiser, or can compile it at first use (needs nvcc)."""
    from torch.utils import cpp_extension  # imported here: this module imports setuptools, which no other run needs

    toolkit = cpp_extension.CUDA_HOME
    return bool(installed_ops.get("quantizer")) or (toolkit is not None and (Path(toolkit) / "bin" / "nvcc").exists())


def _set_up(ranks: Ranks) -> None:
    """Prepare DeepSpeed: it uses this rank's device, and the process group that the rank has already joined."""
    if ranks.device.type == "cuda":
        from deepspeed.accelerator import cuda_accelerator

        # With NVML, DeepSpeed asks for free memory by numbers in CUDA_VISIBLE_DEVICES, and
        # fails if this variable has UUIDs.
        cuda_accelerator.pynvml = None
    if ranks.device.type == "cpu":
        # On its first start, DeepSpeed would take a minute to compile an operation that only inference uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=ranks.backend, auto_mpi_discovery=False)


def _list_uses(model: nn.Module) -> list[int]:
    """The ids of parameters in the order in which forward and backward need them. A tied parameter occurs once for each module
    that uses it.

    Forward uses modules in the order of `model.modules()`, backward in the reverse order. A checkpointed block is recomputed
    before its backward, except its last module, because backward needs only the inputs of the last module.
    """
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


def _build_sharded(
    model: nn.Module,
    deferred: Deferred,
    blocks: Iterable[nn.Module],
    ranks: Ranks,
    config: dict[str, Any],
    computed: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Fill and shard the blocks of a model on the meta device, one by one, and then the rest of the model. A collective.

    config: DeepSpeed's configuration. computed: the dtype to which the weights are cast; None: they are not cast. Returns this
    rank's parts of the fp32 weights by name, in host memory; an empty dict if `computed` is None.
    """
    parts: dict[str, torch.Tensor] = {}
    init: Any = None
    for module in (*blocks, model):
        deferred.fill(module)
        if computed is not None:
            for name, parameter in model.named_parameters():
                if not parameter.is_meta and name not in parts:
                    parts[name] = _cut_part(parameter.detach(), ranks.rank, ranks.world_size).cpu()
            module.to(computed)
        if init is None:  # one object for all blocks: each object allocates buffers if parameters are offloaded to NVMe
            init = deepspeed.zero.Init(module=module, config_dict_or_path=config)
        else:
            init._convert_to_zero_parameters(module.parameters())
    return parts


def _cut_part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The elements of a whole parameter that belong to a rank in ZeRO-3, 1-dim. DeepSpeed pads each parameter, so that its size
    is a multiple of the number of ranks."""
    flat = whole.flatten()
    return pad(flat, (0, -flat.numel() % ranks)).chunk(ranks)[rank]
