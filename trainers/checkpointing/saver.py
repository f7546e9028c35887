"""Saves the state of an engine into a checkpoint and loads a checkpoint into an engine, for every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs import checkpoint
from shardlab.runs.checkpoint import CheckpointManifest
from trainers.checkpointing import state_parts
from trainers.checkpointing.state_parts import State, TensorPart
from trainers.checkpointing.storage import BoxReader, GatheringWriter, LoadingPlanner, SavingPlanner, ShardWriter, TensorIndex

if TYPE_CHECKING:
    from trainers.engine import Checkpointable

INDEX = "index.json"


class CheckpointSaver:
    """Saves and loads checkpoints on one of the ranks that train. Every method is a collective of these ranks.

    rank, world: the rank of this process and the number of ranks that train. group: the process group of the ranks that train,
    with gloo as its backend, because plans and gathered tensors are exchanged in host memory.
    """

    def __init__(self, engine: Checkpointable, rank: int, world: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self._engine, self._rank, self._world, self._device, self._group = engine, rank, world, device, group

    def save(self, checkpoint_folder: Path, layout: Literal["sharded", "whole"]) -> tuple[list[checkpoint.CheckpointFile], int]:
        """Write the files of a checkpoint into an empty folder that all ranks see.

        layout: `sharded`: each rank writes its own parts; `whole`: rank 0 gathers and writes whole tensors. On rank 0, returns
        (the entries of the files for the manifest, the sum of their bytes); on other ranks, ([], 0).
        """
        parts = self._engine.make_state_parts() | state_parts.make_random_state_parts(self._device)
        named_parts = self._name_parts(parts, self._world)
        writer = ShardWriter(checkpoint_folder, self._rank)
        if layout == "whole":
            writer = GatheringWriter(checkpoint_folder, self._group, self._engine.element_order)
        save(named_parts, storage_writer=writer, planner=SavingPlanner(), process_group=self._group)
        if self._rank:
            return [], 0
        index_file = checkpoint.GrowingFile(checkpoint_folder / INDEX)
        index_file.write(msgspec.json.encode(writer.index))
        checkpoint_files = [*writer.files, index_file.close()]
        return checkpoint_files, sum(file.bytes for file in checkpoint_files)

    def load(self, checkpoint_folder: Path, manifest: CheckpointManifest) -> None:
        """Load an undamaged checkpoint into the engine. Raises InputError if it does not fit the engine.

        Buffers and the errors of PowerSGD differ between ranks, so a checkpoint has them for each rank. If the number of ranks
        differs from the saved number N, rank r loads the buffers and errors of the saved rank r modulo N, and random numbers
        start again from the seed.
        """
        self._engine.allocate_optimizer_state(manifest.numbers)
        parts: State = self._engine.make_state_parts()
        if manifest.world == self._world:
            parts |= state_parts.make_random_state_parts(self._device)
        named_parts = self._name_parts(parts, manifest.world)
        index = msgspec.json.decode(files.read(checkpoint_folder / INDEX), type=TensorIndex)
        is_whole = manifest.layout == "whole"
        for name, part in named_parts.items():
            tensor_entry = index.tensors.get(name)
            if tensor_entry is None:
                raise InputError(
                    f"{checkpoint_folder}: has no tensor {name}, which this run needs (saved by {manifest.strategy})."
                )
            if not is_whole and tensor_entry.shape != list(part.shape):
                raise InputError(
                    f"{checkpoint_folder}: {name} has the shape {tensor_entry.shape}, expected {list(part.shape)}."
                )
        file_sizes = {file.name: file.bytes for file in manifest.files}
        reader = BoxReader(checkpoint_folder, index, file_sizes, named_parts, self._engine.element_order if is_whole else None)
        with torch.no_grad():
            load(dict(named_parts), storage_reader=reader, planner=LoadingPlanner(), process_group=self._group)
            self._engine.finish_loading(manifest.numbers)
        if manifest.world == self._world:
            state_parts.restore_random_state(parts, self._device)

    def _name_parts(self, state: State, saved_world_size: int) -> dict[str, TensorPart]:
        """The parts of a state, by the names of the parts in a checkpoint. The name of a tensor that differs
        between ranks (`differs_by_rank`) begins with the number of the saved rank."""
        rank = self._rank % saved_world_size
        return {f"rank-{rank:05d}/{name}" if part.differs_by_rank else name: part for name, part in state.items()}
