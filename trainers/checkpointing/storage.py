"""Storage for torch.distributed.checkpoint with files of plain bytes and an index in JSON.

Torch plans which rank writes and reads which bytes. Torch's own storage is not used, because its files contain pickles, which
can execute any code when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardlab.runs.checkpoint import CheckpointFile, GrowingFile
from trainers.checkpointing.state_parts import State

ALIGNED = 64  # each box begins at a multiple of 64 bytes, so that a tensor of any dtype can use the mapped file as its memory
Reorder = Callable[[str, torch.Size], torch.Tensor | None]


class Box(msgspec.Struct, frozen=True):
    """A box of a tensor, and the bytes in a file that contain its elements, row by row. begin: offset in the file, in bytes."""

    offsets: list[int]
    sizes: list[int]
    file: str
    begin: int


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint. dtype: its name in torch, such as `float32`. boxes: together they contain each element of the
    tensor exactly once."""

    dtype: str
    shape: list[int]
    boxes: list[Box]


class Index(msgspec.Struct, frozen=True):
    """The content of index.json: every tensor of the checkpoint by name."""

    tensors: dict[str, TensorEntry]


class SavingPlanner(DefaultSavePlanner):
    """A planner for saving that finds a `TensorPart` by its name alone, because a rank has only one part per name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        memory: torch.Tensor = self.state_dict[index.fqn].memory
        return memory


class LoadingPlanner(DefaultLoadPlanner):
    """A planner for loading that finds a `TensorPart` by its name alone, as `SavingPlanner` does."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        memory: torch.Tensor = self.state_dict[index.fqn].memory
        return memory


class Writer(StorageWriter):
    """Writes checkpoints of the layout `sharded`: each rank writes its boxes into one file, one box after the other.

    If several ranks have the same box, one of them writes it. After saving, `index` and `files` are set on the first rank.
    """

    gathers = False
    index: Index
    files: list[CheckpointFile]

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank:05d}.bin"

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: each checkpoint has its own writer."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch calls this to choose a storage for a checkpoint name; this writer gets its folder explicitly

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done(self._write((item, planner.resolve_data(item)) for item in plan.items))

    def _write(self, boxes: Iterator[tuple[WriteItem, Any]]) -> list[WriteResult]:
        found, growing = [], None
        for item, tensor in boxes:
            growing = growing or GrowingFile(self._path)
            content = _bytes(tensor)
            growing.write(bytes(-growing.size % ALIGNED))
            found.append((item, tensor, growing.size, len(content)))
            growing.write(content)
        file = growing.close() if growing else None
        return [
            WriteResult(
                item.index, size, (Box(list(item.index.offset or ()), list(tensor.shape), self._path.name, begin), file)
            )
            for item, tensor, begin, size in found
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, TensorEntry] = {}
        files: dict[str, CheckpointFile] = {}
        for result in (result for of_rank in results for result in of_rank):
            box, file = result.storage_data
            about = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(about, TensorStorageMetadata)
            dtype = str(about.properties.dtype).removeprefix("torch.")
            shape = box.sizes if self.gathers else list(about.size)
            tensors.setdefault(result.index.fqn, TensorEntry(dtype, shape, [])).boxes.append(box)
            files[file.name] = file
        self.index, self.files = Index(tensors), [files[name] for name in sorted(files)]


class Gatherer(Writer):
    """Writes checkpoints of the layout `whole`: the first rank gathers one tensor after the other and writes it.

    reorder: the method `Saved.reordered` of the engine, which brings the elements of a tensor into the order of `Task.model`.
    """

    gathers = True

    def __init__(self, folder: Path, group: dist.ProcessGroup, reorder: Reorder) -> None:
        super().__init__(folder, 0)
        self._path = folder / "whole.bin"
        self._group, self._reorder = group, reorder
        self._plans: list[SavePlan] = []  # the plans of all ranks; only the first rank has them

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._plans = plans
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._plans:
            return _done(self._write(self._gathered(planner)))
        for item in sorted(plan.items, key=_place):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            dist.send(_flat_bytes(tensor), group_dst=0, group=self._group)
        return _done([])

    def _gathered(self, planner: SavePlanner) -> Iterator[tuple[WriteItem, torch.Tensor]]:
        everything = sorted(
            ((_place(item), rank, item) for rank, plan in enumerate(self._plans) for item in plan.items),
            key=lambda entry: (entry[0][0], entry[1], entry[0][1]),
        )
        for position, (_, rank, item) in enumerate(everything):
            about, name = item.tensor_data, item.index.fqn
            assert about is not None
            assert about.chunk is not None
            first = position == 0 or everything[position - 1][2].index.fqn != name
            last = position == len(everything) - 1 or everything[position + 1][2].index.fqn != name
            if first:
                together = torch.empty(about.size, dtype=about.properties.dtype)
            box = torch.empty(about.chunk.sizes, dtype=about.properties.dtype)
            if rank == 0:
                mine = planner.resolve_data(item)
                assert isinstance(mine, torch.Tensor)
                box.copy_(mine)
            else:
                dist.recv(_flat_bytes(box), group_src=rank, group=self._group)
            together[tuple(slice(at, at + n) for at, n in zip(about.chunk.offsets, about.chunk.sizes))] = box
            if last:
                order = self._reorder(name, together.shape)
                together = together if order is None else together.flatten()[order]
                yield WriteItem(MetadataIndex(name, [0] * together.dim()), item.type, tensor_data=item.tensor_data), together


class Reader(StorageReader):
    """Reads checkpoints: maps the files into memory and copies the boxes that overlap with the parts of this rank.

    folder: the folder of the checkpoint. sizes: file name -> bytes of the file. state: the parts to read. reorder: for the
    layout `whole`, the method `Saved.reordered` of the engine; it allows that a tensor is read in another shape with the same
    number of elements. For the layout `sharded`, None.
    """

    def __init__(self, folder: Path, index: Index, sizes: dict[str, int], state: State, reorder: Reorder | None) -> None:
        self._folder, self._sizes, self._reorder = folder, sizes, reorder
        self._entries = {name: self._as_asked(entry, state.get(name)) for name, entry in index.tensors.items()}
        self._mapped: dict[str, torch.Tensor] = {}

    def _as_asked(self, entry: TensorEntry, part: Any) -> TensorEntry:
        if self._reorder is None or part is None or math.prod(part.shape) != math.prod(entry.shape):
            return entry
        shape = list(part.shape)
        box = msgspec.structs.replace(entry.boxes[0], offsets=[0] * len(shape), sizes=shape)
        return msgspec.structs.replace(entry, shape=shape, boxes=[box])

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: each checkpoint has its own reader."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the caller has already read the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = {}
        for name, entry in self._entries.items():
            boxes = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        return Metadata(dict(found))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = item.storage_index.fqn
            tensor = self._box(name, list(item.storage_index.offset or ()))
            for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                tensor = tensor.narrow(dimension, begin, length)
            planner.resolve_tensor(item).copy_(tensor)
        return _done(None)

    def _box(self, name: str, offsets: list[int]) -> torch.Tensor:
        entry = self._entries[name]
        box = next(box for box in entry.boxes if box.offsets == offsets)
        if box.file not in self._mapped:
            path = str(self._folder / box.file)
            self._mapped[box.file] = torch.from_file(path, shared=False, size=self._sizes[box.file], dtype=torch.uint8)
        dtype = getattr(torch, entry.dtype)
        content = self._mapped[box.file].narrow(0, box.begin, math.prod(box.sizes) * dtype.itemsize).view(dtype)
        if self._reorder is not None and (order := self._reorder(name, torch.Size(entry.shape))) is not None:
            content = torch.empty_like(content).index_copy_(0, order.flatten(), content)
        return content.view(box.sizes)


def _place(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return _flat_bytes(tensor).numpy().data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
