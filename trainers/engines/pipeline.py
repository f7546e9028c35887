"""The engine of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.instruments.timing import BACKWARD, make_clock
from trainers.parallel.engine import MeshModelEngine
from trainers.parallel.mesh_model import MeshModel
from trainers.parallel.schedule import Pipeline

if TYPE_CHECKING:
    from trainers.instruments.timing import Clock
    from trainers.parallel.mesh_model import MeshModel
    from trainers.parallel.schedule import Pipeline
    from trainers.ranks.ranks import Ranks
    from trainers.task import Batch, Task


class PipelineEngine(MeshModelEngine):
    """Sends the micro-batches of a step through the stages. All stages of a pipeline train on the same slice of the data."""

    is_pipelined = True

    def __init__(self, cell: Cell, ranks: Ranks, mesh_model: MeshModel, pipeline: Pipeline) -> None:
        super().__init__(cell, ranks, mesh_model)
        self._pipeline = pipeline
        pipeline.scaler = self.scaler
        clock = make_clock(ranks.device)
        clock.start()
        pipeline.warm_up(clock)  # the setup of the schedule is done here and not in the first timed step
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, micro_batches: Sequence[Batch], clock: Clock) -> torch.Tensor:
        loss = self._pipeline.make_step(micro_batches, clock)
        self.mesh_model.sum_tied_gradients()
        self.unscale()
        clock.mark(BACKWARD)
        return loss

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss_and_correct = self._pipeline.evaluate(batch)
        model_options.free_gathered_parameters(self.model)
        return loss_and_correct

    def effective(self) -> dict[str, Any]:
        return {**super().effective(), **self._pipeline.read_effective_settings()}


def build(cell: Cell, task: Task, ranks: Ranks, *, schedule: str) -> PipelineEngine:
    mesh_model = MeshModel(cell, task, ranks, stages=cell.pp * cell.stages_per_rank)
    return PipelineEngine(cell, ranks, mesh_model, Pipeline(cell, mesh_model, ranks.device, schedule))
