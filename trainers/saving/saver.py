"""Save what an engine goes on from into a checkpoint, and put a checkpoint back into an engine, whatever its strategy is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardlab import checkpoint
from shardlab.checkpoint import Manifest
from shardlab.errors import InputError
from trainers.saving import state_parts
from trainers.saving.state_parts import Part, State
from trainers.saving.storage import Gatherer, Index, LoadingPlanner, Reader, SavingPlanner, Writer

if TYPE_CHECKING:
    import torch.distributed as dist

    from trainers.strategy import Engine

INDEX = "index.json"


class Saver:
    """The ranks that train as one of them sees them when it saves or loads. All of them call everything together.

    group: of these ranks, over gloo: plans and gathered tensors are exchanged on the host.
    """

    def __init__(self, engine: Engine, rank: int, world: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self._engine, self._rank, self._world, self._device, self._group = engine, rank, world, device, group

    def save(self, growing: Path, layout: Literal["sharded", "whole"]) -> tuple[list[checkpoint.File], int]:
        """Write the files of a checkpoint into an empty folder that all ranks see; (what rank 0 has to put into the
        manifest, bytes). Other ranks get nothing."""
        state = self._named({**self._engine.state(), **state_parts.of_random_numbers(self._device)}, self._world)
        writer = Writer(growing, self._rank)
        if layout == "whole":
            writer = Gatherer(growing, self._group, self._engine.reordered)
        save(state, storage_writer=writer, planner=SavingPlanner(), process_group=self._group)
        if self._rank:
            return [], 0
        index = checkpoint.Growing(growing / INDEX)
        index.write(msgspec.json.encode(writer.index))
        found = [*writer.files, index.close()]
        return found, sum(file.bytes for file in found)

    def load(self, path: Path, manifest: Manifest) -> None:
        """Fill the engine from a checkpoint, which has been found sound. Raises InputError where it is of another kind.

        What is each rank's own (buffers, PowerSGD's errors) a rank of another world takes from the saved rank of its
        number modulo the world saved; random numbers then begin anew.
        """
        self._engine.make_room(manifest.numbers)
        state: State = self._engine.state()
        if manifest.world == self._world:
            state |= state_parts.of_random_numbers(self._device)
        asked = self._named(state, manifest.world)
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=Index)
        whole = manifest.layout == "whole"
        for name, part in asked.items():
            entry = index.tensors.get(name)
            if entry is None:
                raise InputError(f"{path}: has no {name}, which {manifest.strategy} saved there would have.")
            if not whole and entry.shape != list(part.shape):
                raise InputError(f"{path}: {name} has the shape {entry.shape}, expected {list(part.shape)}.")
        sizes = {file.name: file.bytes for file in manifest.files}
        reader = Reader(path, index, sizes, asked, self._engine.reordered if whole else None)
        with torch.no_grad():
            load(dict(asked), storage_reader=reader, planner=LoadingPlanner(), process_group=self._group)
            self._engine.restored(manifest.numbers)
        if manifest.world == self._world:
            state_parts.set_random_numbers(state, self._device)

    def _named(self, state: State, saved_world: int) -> dict[str, Part]:
        """Parts by their names in a checkpoint, where a tensor that is each rank's own has the rank in front."""
        rank = self._rank % saved_world
        return {f"rank-{rank:05d}/{name}" if part.own else name: part for name, part in state.items()}
