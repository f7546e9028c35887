"""The engines of combinations of tensor, pipeline and sharded data parallelism on one mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.engines.pipeline import PipelineEngine
from trainers.engines.tensor import TensorEngine, count_split_layers
from trainers.parallel import fsdp
from trainers.parallel.fsdp import FullyShardedEngine
from trainers.parallel.mesh_model import MeshModel
from trainers.parallel.schedule import Pipeline
from trainers.strategy_options import TensorOptions

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class ShardedTensorEngine(FullyShardedEngine, TensorEngine):
    """Tensor parallelism with FSDP2: blocks are split over the tp ranks, and each rank's part is then sharded over the dp
    ranks."""

    def effective(self) -> dict[str, Any]:
        return {**super().effective(), **fsdp.read_effective_settings(self.mesh_model.module, self.mesh_model.blocks)}


class MeshPipelineEngine(PipelineEngine):
    """Pipeline parallelism in which blocks may also be split over the tp ranks and sharded over the dp ranks."""

    def effective(self) -> dict[str, Any]:
        settings, degrees = super().effective(), menu.find_strategy_of_cell(self.cell).degrees
        if "tp" in degrees:
            settings["split_layers"] = count_split_layers(self.mesh_model)
        return settings | (
            fsdp.read_effective_settings(self.mesh_model.module, self.mesh_model.blocks) if "dp" in degrees else {}
        )


def build(cell: Cell, task: Task, ranks: Ranks) -> TensorEngine | PipelineEngine:
    """The engine for the mesh dimensions (`degrees`) of the cell's strategy."""
    degrees = menu.find_strategy_of_cell(cell).degrees
    if "pp" not in degrees:
        splits_sequence = TensorOptions(cell.options).sequence_parallel
        model = MeshModel(cell, task, ranks, split=True, sequence=splits_sequence, reshard_after_forward=True)
        return ShardedTensorEngine(cell, ranks, model)
    is_sharded = "dp" in degrees
    reshard_after_forward = False if is_sharded else None
    model = MeshModel(cell, task, ranks, stages=cell.pp, split="tp" in degrees, reshard_after_forward=reshard_after_forward)
    pipeline = Pipeline(cell, model, ranks.device, "1f1b", sharded=is_sharded)
    return MeshPipelineEngine(cell, ranks, model, pipeline)
