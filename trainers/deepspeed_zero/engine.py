"""The engine of ZeRO, which wraps DeepSpeed's own engine.

One collective gathers many of the parameters or gradients that ZeRO has sharded. DeepSpeed's own `safe_get_full_grad` and
`safe_get_full_fp32_param` need one collective per parameter: over gloo, a same-work proof took more time for these calls than
for its steps. The number of sent bytes is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from trainers.deepspeed_zero import deepspeed_config, zero_state
from trainers.dtypes import dtype_name
from trainers.model import activation_checkpointing, precision
from trainers.replicated import ReplicatedEngine
from trainers.theory.term import ModelPart, Term
from trainers.theory.zero import list_zero_terms

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.model.deferred_init import DeferredModel
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task
from collections.abc import Iterator

import torch.distributed as dist
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad

BUCKET_ELEMENTS = 2**24  # elements per collective: 64 MiB in fp32; a rank needs memory for two copies of these elements


class ZeroEngine(ReplicatedEngine):
    """Calls DeepSpeed's engine for each pass and step. With bf16 and fp16, DeepSpeed casts the model to 16 bits and keeps fp32
    weights in its optimizer."""

    casts_itself = True
    model: Any
    """deepspeed.DeepSpeedEngine."""

    def __init__(
        self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, stage: int, deferred: DeferredModel | None = None
    ) -> None:
        """deferred: the object that fills a model on the meta device, only for stage 3; None: the model is in host memory."""
        _prepare_deepspeed(ranks)
        self.stage = stage
        size_divisor = 2 * ranks.world_size  # ZeRO++ quantises only parameters whose size is divisible by this number
        self._matrix_elements = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p.numel() % size_divisor == 0)
        element_counts = [p.numel() for p in model.parameters() if p.requires_grad]
        self.config = deepspeed_config.make_config(
            cell, stage, element_count=sum(element_counts), pin_memory=ranks.device.type == "cuda"
        )
        low_dtype = dtypes.cast_dtype(cell.precision)
        if deferred is not None:
            blocks = activation_checkpointing.list_block_units(task, model)
            initial_weights = _build_sharded(model, deferred, blocks, ranks, self.config, low_dtype)
        else:
            # DeepSpeed moves this rank's part of the model to the device, at stage 3 one parameter at a time. `initial` has the
            # fp32 weights without a copy, because casting the model allocates new memory for each parameter.
            initial_weights = {name: p.detach() for name, p in model.named_parameters()} if low_dtype else {}
            model.to(low_dtype or dtypes.weight_dtype(cell.precision))
        super().__init__(cell, task, ranks, model)
        self.scaler = None  # shardlab's loss scaler is not used, because DeepSpeed has its own
        # The number of elements of each parameter before sharding, because afterwards its size is 0, and the order of use.
        self._elements_by_id = dict(zip((id(p) for p in model.parameters() if p.requires_grad), element_counts, strict=True))
        self._parameter_uses = _list_parameter_uses(model)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=self.config)
        self._write_initial_weights(initial_weights, whole=deferred is None)

    def _write_initial_weights(self, initial_weights: dict[str, torch.Tensor], *, whole: bool) -> None:
        """Write the initial fp32 weights into the optimizer. Without this, DeepSpeed's fp32 weights would be the initial
        weights rounded to 16 bits.

        initial_weights: the initial weights by name. whole: whether `initial_weights` has whole parameters; if not, it has
        this rank's parts.
        """
        fp32_weights = self._map_stage0_weights()
        for name, parameter in self.model.module.named_parameters():
            if name in initial_weights and self.stage == 3:
                # DeepSpeed's function that sets a whole parameter fails if the parameter's size is not divisible by the number
                # of ranks.
                weight_part = (
                    _slice_for_rank(initial_weights[name], self.data_rank, self.data_ranks) if whole else initial_weights[name]
                )
                safe_set_local_fp32_param(parameter, weight_part.to(self.device))
            elif name in initial_weights and self.stage:
                safe_set_full_fp32_param(parameter, initial_weights[name].to(self.device))
            elif name in initial_weights:
                fp32_weights[parameter].detach().copy_(initial_weights[name])

    def _map_stage0_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """At stage 0, where nothing is sharded: a dict from each 16-bit weight of the model to its fp32 weight. Empty at other
        stages."""
        optimizer = self.model.optimizer
        low_groups, fp32_groups = (getattr(optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
        if self.stage != 0:
            return {}
        return {p: weight for low, fp32 in zip(low_groups, fp32_groups) for p, weight in zip(low, fp32)}

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        if self.stage == 0 and self.cell.precision == "fp16":
            # At stage 0, DeepSpeed 0.19 divides gradients by the loss scale in `step`, but it never multiplies the loss by
            # this scale.
            loss = loss * self._find_deepspeed_scaler().cur_scale
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is already divided by the number of micro-batches

    def update(self) -> None:
        self.model.step()

    def gradient_norm(self) -> float:
        parameters = self.model.module.parameters()
        squared_norms = [gradient.float().square().sum() for gradient in self._gather_whole(parameters, gradients=True)]
        loss_scale = self._find_deepspeed_scaler().cur_scale if self.cell.precision == "fp16" else 1.0
        return float(torch.stack(squared_norms).sum().sqrt()) / loss_scale

    def _find_deepspeed_scaler(self) -> Any:
        """DeepSpeed's object with the loss scale of an fp16 run (`cur_scale`). Gradients stay scaled until the step."""
        optimizer = self.model.optimizer
        return optimizer.loss_scaler if self.stage else optimizer.loss_scale_config

    def start_loss_scale(self, scale: float) -> None:
        if self.cell.precision == "fp16":
            self._find_deepspeed_scaler().cur_scale = scale

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        names, parameters = zip(*self.model.module.named_parameters(), strict=True)
        weights = self._gather_whole(parameters, gradients=False)
        return {
            model_options.plain_name(name): weight.detach().float().cpu().clone()
            for name, weight in zip(names, weights, strict=True)
        }

    def _gather_whole(self, parameters: Iterable[nn.Parameter], *, gradients: bool) -> Iterable[torch.Tensor]:
        """The whole weight of each parameter, or its whole gradient, on every rank. A collective."""
        if self.stage:
            return gather_whole(parameters, gradients=gradients)
        fp32_weights = {} if gradients else self._map_stage0_weights()
        return (safe_get_full_grad(p) if gradients else fp32_weights.get(p, p) for p in parameters)

    def list_tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        tensors, zero_optimizer = super().list_tensors_by_category(), self.model.optimizer
        averaged_gradients = getattr(zero_optimizer, "averaged_gradients", {}).values()
        tensors["gradient"] += [gradient for group in averaged_gradients for gradient in group or () if gradient is not None]
        if self.stage == 3:
            parameters = list(self.model.module.parameters())
            if zero_optimizer.grad_partitions_flat_buffer is not None:
                tensors["gradient"].append(zero_optimizer.grad_partitions_flat_buffer)
            tensors["master_parameter"] += zero_optimizer.fp32_partitioned_groups_flat
            tensors["parameter"] = [p.ds_tensor for p in parameters]
            tensors["gathered"] = parameters  # not p.data: each access makes a tensor, and each operator calls this method
            # For some time, gradients are views of this buffer. A tensor counts for the first category that has it, so `buffer`
            # must stand before `gradient`.
            buffers = [bucket.buffer for bucket in zero_optimizer.ipg_buckets.values() if bucket.buffer is not None]
            tensors = {"buffer": buffers, **tensors}
        return tensors

    def make_state_parts(self) -> State:
        parts = zero_state.make_checkpoint_parts(self.model, self.optimizer, self._elements_by_id)
        return {**parts, **state_parts.make_buffer_parts(self.model.module)}

    def allocate_optimizer_state(self, numbers: dict[str, float]) -> None:
        zero_state.allocate_optimizer_state(self.model, self.optimizer)

    def finish_loading(self, numbers: dict[str, float]) -> None:
        zero_state.finish_loading(self.model)

    def count_parameters(self) -> int:
        return sum(self._elements_by_id.values())  # sizes before sharding, because a sharded parameter has the size 0

    def theory(self) -> list[Term]:
        fetched = self._count_fetched_elements() if self.stage == 3 else None
        model_part = ModelPart(elements=self.count_parameters(), fetched=fetched, matrix_elements=self._matrix_elements)
        return cast("list[Term]", list_zero_terms(self.cell, model_part, stage=self.stage))

    def _count_fetched_elements(self) -> tuple[int, int]:
        """Two numbers of parameter elements: (elements that a pass gathers, counted each time they are gathered; elements that
        are not sharded).

        After its use a parameter is freed, unless it is needed again within max_reuse_distance elements.
        """
        zero_section = self.config["zero_optimization"]
        least_elements, reuse_distance = (
            zero_section[f"stage3_{name}"] for name in ("param_persistence_threshold", "max_reuse_distance")
        )
        fetched_elements, used_elements = 0, 0
        last_use: dict[int, int] = {}  # id of a parameter -> number of elements that were used up to its last use
        for parameter in self._parameter_uses:
            element_count = self._elements_by_id[parameter]
            if element_count > least_elements and (
                parameter not in last_use or used_elements - last_use[parameter] >= reuse_distance
            ):
                fetched_elements += element_count
            used_elements += element_count
            last_use[parameter] = used_elements
        return fetched_elements, sum(
            element_count for element_count in self._elements_by_id.values() if element_count <= least_elements
        )

    def compute_textbook_bytes(self) -> float:
        return (3 if self.stage == 3 else 2) * float(precision.weight_bytes(self.cell.precision)) * self.count_parameters()

    def effective(self) -> dict[str, Any]:
        engine = self.model
        zero_config = engine._config.zero_config
        settings: dict[str, Any] = {
            **super().effective(),
            "zero_stage": int(engine.zero_optimization_stage()),
            "deepspeed_optimizer": type(engine.optimizer).__name__,
            "max_grad_norm": engine.gradient_clipping() or None,
            "gradients_reduced_as": dtype_name(engine.communication_data_type),
            "gradients_added_up_as": dtype_name(engine.get_data_types()[1]),
        }
        if self.cell.precision == "fp16":
            settings |= {"loss_scale": self._find_deepspeed_scaler().cur_scale, "skipped_steps": engine.skipped_steps}
        if self.stage:
            settings |= {
                "reduce_bucket_size": getattr(engine.optimizer, "reduce_bucket_size", None),
                "overlap_comm": bool(getattr(engine.optimizer, "overlap_comm", self.stage == 3 and zero_config.overlap_comm)),
                "offload_optimizer": zero_config.offload_optimizer.device if zero_config.offload_optimizer else "none",
            }
        if self.stage == 3:
            parameters = list(engine.module.parameters())
            settings |= {
                "uncut_parameters": sum(p.ds_numel for p in parameters if p.ds_persist),
                "shard_parameters": sum(p.ds_tensor.numel() for p in parameters),
                "offload_param": zero_config.offload_param.device if zero_config.offload_param else "none",
                "max_reuse_distance": zero_config.max_reuse_distance,
                "hpz_partition_size": parameters[0].ds_secondary_tensor_group_size
                if zero_config.zero_hpz_partition_size > 1
                else 1,
                "quantized_weights": zero_config.zero_quantized_weights,
                "quantized_gradients": zero_config.zero_quantized_gradients,
            }
        return settings


def has_quantiser() -> bool:
    """Whether DeepSpeed was installed with its compiled quantiser, or can compile it at first use (needs nvcc)."""
    from torch.utils import cpp_extension  # imported here: this module imports setuptools, which no other run needs

    cuda_toolkit = cpp_extension.CUDA_HOME
    return bool(installed_ops.get("quantizer")) or (cuda_toolkit is not None and (Path(cuda_toolkit) / "bin" / "nvcc").exists())


def _prepare_deepspeed(ranks: Ranks) -> None:
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


def _list_parameter_uses(model: nn.Module) -> list[int]:
    """The ids of parameters in the order in which forward and backward need them. A tied parameter occurs once for each module
    that uses it.

    Forward uses modules in the order of `model.modules()`, backward in the reverse order. A checkpointed block is recomputed
    before its backward, except its last module, because backward needs only the inputs of the last module.
    """
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    wrapper_by_module_id = {id(module): wrapper for wrapper in wrappers for module in wrapper.modules()}

    def list_trained_ids(module: nn.Module) -> list[int]:
        return [id(p) for p in module.parameters(recurse=False) if p.requires_grad]

    modules_with_parameters = [module for module in model.modules() if list_trained_ids(module)]
    modules_by_use = list(modules_with_parameters)
    previous_wrapper: nn.Module | None = None
    for module in reversed(modules_with_parameters):
        wrapper = wrapper_by_module_id.get(id(module))
        if wrapper is not None and wrapper is not previous_wrapper:
            modules_by_use += [inner for inner in wrapper.modules() if list_trained_ids(inner) and inner is not module]
        previous_wrapper = wrapper
        modules_by_use.append(module)
    return [parameter for module in modules_by_use for parameter in list_trained_ids(module)]


def _build_sharded(
    model: nn.Module,
    deferred: DeferredModel,
    blocks: Iterable[nn.Module],
    ranks: Ranks,
    config: dict[str, Any],
    cast_to: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Fill and shard the blocks of a model on the meta device, one by one, and then the rest of the model. A collective.

    config: DeepSpeed's configuration. cast_to: the dtype to which the weights are cast; None: they are not cast. Returns this
    rank's parts of the fp32 weights by name, in host memory; an empty dict if `cast_to` is None.
    """
    initial_weights: dict[str, torch.Tensor] = {}
    zero_init: Any = None
    for module in (*blocks, model):
        deferred.fill_module(module)
        if cast_to is not None:
            for name, parameter in model.named_parameters():
                if not parameter.is_meta and name not in initial_weights:
                    initial_weights[name] = _slice_for_rank(parameter.detach(), ranks.rank, ranks.world_size).cpu()
            module.to(cast_to)
        if zero_init is None:  # one object for all blocks: each object allocates buffers if parameters are offloaded to NVMe
            zero_init = deepspeed.zero.Init(module=module, config_dict_or_path=config)
        else:
            zero_init._convert_to_zero_parameters(module.parameters())
    return initial_weights


def _slice_for_rank(parameter: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The elements of a whole parameter that belong to a rank in ZeRO-3, 1-dim. DeepSpeed pads each parameter, so that its size
    is a multiple of the number of ranks."""
    flat_parameter = parameter.flatten()
    return pad(flat_parameter, (0, -flat_parameter.numel() % world_size)).chunk(world_size)[rank]


def gather_whole(parameters: Iterable[Any], *, gradients: bool) -> Iterator[torch.Tensor]:
    """The whole fp32 weight of each parameter, or its whole gradient. For ZeRO stages 1 to 3. All ranks must call it.

    gradients: whether to gather gradients, which exist between a backward pass and the update.
    """
    bucket: list[Any] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(map(_count_elements, bucket)) >= BUCKET_ELEMENTS:
            yield from _gather_bucket(bucket, gradients)
            bucket = []
    if bucket:
        yield from _gather_bucket(bucket, gradients)


def _count_elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _gather_bucket(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    return _gather_stage_3(bucket, gradients) if hasattr(bucket[0], "ds_id") else _gather_by_sum(bucket, gradients)


def _gather_stage_3(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    """Gather for stage 3, which shards each parameter into equal parts and pads the last part."""
    read_shard = safe_get_local_grad if gradients else safe_get_local_fp32_param
    parameter_shards = [read_shard(parameter).detach().float().flatten() for parameter in bucket]
    local_shards = torch.cat(parameter_shards)
    gathered_shards = local_shards.new_empty((dist.get_world_size(), len(local_shards)))
    dist.all_gather(list(gathered_shards), local_shards)
    parameter_columns = torch.split(gathered_shards, [len(share) for share in parameter_shards], dim=1)
    return [part.flatten()[: p.ds_numel].view(p.ds_shape) for p, part in zip(bucket, parameter_columns, strict=True)]


def _gather_by_sum(bucket: list[Any], gradients: bool) -> list[torch.Tensor]:
    """Gather for stages 1 and 2, which shard all parameters as one vector: each rank writes its part into a tensor of zeros,
    and an all-reduce adds these tensors."""
    summed_elements = torch.zeros(sum(map(_count_elements, bucket)), dtype=torch.float32, device=bucket[0].device)
    parameter_parts = torch.split(summed_elements, [_count_elements(parameter) for parameter in bucket])
    for parameter, part in zip(bucket, parameter_parts, strict=True):
        mapping = parameter._hp_mapping
        if mapping is None:
            continue  # this rank has no element of the parameter
        fragment = mapping.lp_fragment_address
        shard = (
            mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten() if gradients else mapping.get_hp_fragment()
        )
        if gradients and len(shard) == parameter.numel():
            shard = shard.narrow(0, fragment.start, fragment.numel)  # in bf16, DeepSpeed keeps whole gradients on every rank
        part.narrow(0, fragment.start, fragment.numel).copy_(shard.detach())
    dist.all_reduce(summed_elements)
    return [part.view_as(parameter) for parameter, part in zip(bucket, parameter_parts, strict=True)]
