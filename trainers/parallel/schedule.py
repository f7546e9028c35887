"""The step of a pipeline on one rank, with torch's schedules. The clock measures every pass, and the wait before the pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shardlab.matrix.cell import Cell
from trainers import dtypes, model_options
from trainers.instruments.timing import BACKWARD, FORWARD
from trainers.model.cast_weights import cast_weights

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.model.loss_scaling import LossScaler
    from trainers.parallel.mesh_model import MeshModel
    from trainers.task import Batch

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes that logits can have
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Pipeline:
    """The stages of this rank and their schedule, which exchanges hidden states with the neighbouring stages on other ranks.

    schedule: a key of SCHEDULES. sharded: whether the stages are wrapped by fully_shard, which casts the weights itself.
    """

    def __init__(
        self, cell: Cell, mesh_model: MeshModel, device: torch.device, schedule: str, *, sharded: bool = False
    ) -> None:
        self._cell, self._task, self._mesh_model, self._device = cell, mesh_model.task, mesh_model, device
        self._sharded = sharded
        self._group = mesh_model.mesh["pp"].get_group()
        self._stages = [Stage(self, part, index, device) for index, part in mesh_model.stage_modules.items()]
        self._output_dtype: torch.dtype | None = None
        self.scaler: LossScaler | None = None
        schedule_class: Any = SCHEDULES[schedule]
        self._schedule = schedule_class(
            self._stages if schedule == "interleaved" else self._stages[0],
            cell.gradient_accumulation_steps,
            loss_fn=self._compute_loss,
            scale_grads=False,  # each loss is already divided by the number of micro-batches
        )

    @property
    def stage_count(self) -> int:
        """The number of stages of the whole pipeline."""
        return self._mesh_model.stages

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    def make_cast_context(self) -> AbstractContextManager[object]:
        """The context of forward and backward passes: in it, the weights of the stages are cast to the cell's precision."""
        return cast_weights(self._mesh_model.module, None if self._sharded else dtypes.cast_dtype(self._cell.precision))

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass: torch's autocast, if the cell's precision uses autocast."""
        return dtypes.make_autocast_context(self._cell.precision, self._device)

    def _compute_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._output_dtype = outputs.dtype
        loss = self._task.criterion(outputs, targets) / self._cell.gradient_accumulation_steps
        return loss if self.scaler is None else self.scaler.scale_loss(loss)  # scaled here, because the schedule calls backward

    def make_step(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        """Accumulate the gradients of a step on this rank's stages. Returns the mean loss (0-dim), on every rank."""
        for stage in self._stages:
            stage.clock = clock
        # The schedule needs one whole batch, which it cuts again into the same number of micro-batches.
        whole_inputs = torch.cat([batch.inputs for batch in micro_batches])
        inputs = dtypes.cast_inputs(whole_inputs, self._cell.precision)
        targets = torch.cat([batch.targets for batch in micro_batches])
        losses: list[torch.Tensor] = []
        with self.make_cast_context():
            self._schedule.step(
                *((inputs,) if self._stages[0].is_first else ()),
                target=targets if self._stages[-1].is_last else None,
                losses=losses,
                return_outputs=False,
            )
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)
        if self.scaler is not None:
            loss /= self.scaler.scale
        if self._pipeline_size > 1:
            dist.broadcast(loss, group=self._group, group_src=(self.stage_count - 1) % self._pipeline_size)
        clock.mark(BACKWARD)
        return loss

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Engine.evaluate`, on all ranks of this pipeline.

        The stages run one after the other, without the schedule, because after an evaluation the schedule would infer all
        shapes again in the next timed step.
        """
        stage_rank = self._mesh_model.mesh["pp"].get_local_rank()
        hidden = dtypes.cast_inputs(batch.inputs, self._cell.precision)
        loss_and_correct = torch.zeros(2, dtype=torch.float64, device=self._device)
        with torch.no_grad(), self.make_cast_context(), self.autocast():
            for index in range(self.stage_count):
                owner_rank, previous_rank, next_rank = (
                    number % self._pipeline_size for number in (index, index - 1, index + 1)
                )
                if owner_rank != stage_rank:
                    continue
                if index > 0 and previous_rank != stage_rank:
                    hidden = torch.empty(
                        len(batch.inputs), *self._task.plan().hidden_shape, dtype=self._hidden_dtype, device=self._device
                    )
                    dist.recv(hidden, group=self._group, group_src=previous_rank)
                hidden = self._mesh_model.stage_modules[index](hidden)
                if index == self.stage_count - 1:
                    correct = self._task.correct(hidden, batch.targets)
                    loss_and_correct = torch.stack([self._task.criterion(hidden, batch.targets).double(), correct.double()])
                elif next_rank != stage_rank:
                    dist.send(hidden.contiguous(), group=self._group, group_dst=next_rank)
        if self._pipeline_size > 1:
            dist.broadcast(loss_and_correct, group=self._group, group_src=(self.stage_count - 1) % self._pipeline_size)
        return loss_and_correct[0].float(), loss_and_correct[1].long()

    @property
    def _hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden states between stages."""
        return dtypes.stream_dtype(self._cell.precision)

    def warm_up(self, clock: Clock) -> None:
        """Make a step whose gradients the caller discards. In its first step, the schedule infers shapes and opens connections,
        which must not happen in a timed step."""
        batch = self._task.fetch(np.zeros(self._cell.micro_batch_size, dtype=np.int64), self._device)
        with self.autocast():  # PyTorch's schedule infers shapes with the modules, not with `Stage`, which would use autocast
            self.make_step([batch] * self._cell.gradient_accumulation_steps, clock)

    @property
    def _pipeline_size(self) -> int:
        return self._mesh_model.mesh["pp"].size()

    def read_effective_settings(self) -> dict[str, Any]:
        """The settings that took effect, from the schedule and the stages of all ranks of this pipeline. A collective."""
        block_counts = model_options.count_changed_blocks(self._mesh_model.module)
        dtype_index = LOGIT_DTYPES.index(self._output_dtype) if self._stages[-1].is_last and self._output_dtype else 0
        summed_counts = torch.tensor([*block_counts.values(), dtype_index], device=self._device)
        dist.all_reduce(summed_counts, group=self.group)
        *counts, dtype_index = summed_counts.tolist()
        return {
            **dict(zip(block_counts, counts)),
            "output_dtype": dtypes.dtype_name(LOGIT_DTYPES[dtype_index]),
            "schedule": type(self._schedule).__name__,
            "stages": self._stages[0].num_stages,
            "stages_per_rank": len(self._stages),
            "microbatches": self._schedule._n_microbatches,
        }


class Stage(PipelineStage):
    """A pipeline stage that computes in the cell's precision and marks the end of each pass on the clock."""

    clock: Clock

    def __init__(self, pipeline: Pipeline, stage_module: torch.nn.Module, index: int, device: torch.device) -> None:
        super().__init__(stage_module, index, pipeline.stage_count, device, group=pipeline.group)
        self._autocast = pipeline.autocast

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            output = super().forward_one_chunk(*args, **kwargs)
        self.clock.mark(FORWARD)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(*args, **kwargs)
        self.clock.mark(BACKWARD)
