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

ALIGNMENT = 64  # each box begins at a multiple of 64 bytes, so that a tensor of any dtype can use the mapped file as its memory
ElementOrder = Callable[[str, torch.Size], torch.Tensor | None]


class TensorBox(msgspec.Struct, frozen=True):
    """A box of a tensor, and the bytes in a file that contain its elements, row by row."""

    offsets: list[int]
    sizes: list[int]
    file: str
    begin: int
    """Offset in the file, in bytes."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint."""

    dtype: str
    """Its name in torch, such as `float32`."""
    shape: list[int]
    boxes: list[TensorBox]
    """Together they contain each element of the tensor exactly once."""


class TensorIndex(msgspec.Struct, frozen=True):
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


class _FixedFolder:
    """What torch asks of a writer or a reader of a checkpoint that nothing is to be done for: the folder is given."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: each checkpoint has its own writer or reader."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch calls this to choose a storage for a checkpoint name; the folder is given explicitly


class ShardWriter(_FixedFolder, StorageWriter):
    """Writes checkpoints of the layout `sharded`: each rank writes its boxes into one file, one box after the other.

    If several ranks have the same box, one of them writes it. After saving, `index` and `files` are set on the first rank.
    """

    gathers_tensors = False
    index: TensorIndex
    files: list[CheckpointFile]

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank:05d}.bin"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the folder exists already."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _make_completed_future(self._write_boxes((item, planner.resolve_data(item)) for item in plan.items))

    def _write_boxes(self, boxes: Iterator[tuple[WriteItem, Any]]) -> list[WriteResult]:
        written_boxes, growing_file = [], None
        for item, tensor in boxes:
            growing_file = growing_file or GrowingFile(self._path)
            box_bytes = _view_as_bytes(tensor).numpy().data
            growing_file.write(bytes(-growing_file.written_bytes % ALIGNMENT))
            written_boxes.append((item, tensor, growing_file.written_bytes, len(box_bytes)))
            growing_file.write(box_bytes)
        written_file = growing_file.close() if growing_file else None
        return [
            WriteResult(
                item.index,
                byte_count,
                (TensorBox(list(item.index.offset or ()), list(tensor.shape), self._path.name, begin), written_file),
            )
            for item, tensor, begin, byte_count in written_boxes
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        entry_by_name: dict[str, TensorEntry] = {}
        file_by_name: dict[str, CheckpointFile] = {}
        for write_result in (write_result for rank_results in results for write_result in rank_results):
            box, file = write_result.storage_data
            tensor_metadata = metadata.state_dict_metadata[write_result.index.fqn]
            assert isinstance(tensor_metadata, TensorStorageMetadata)
            dtype = str(tensor_metadata.properties.dtype).removeprefix("torch.")
            shape = box.sizes if self.gathers_tensors else list(tensor_metadata.size)
            entry_by_name.setdefault(write_result.index.fqn, TensorEntry(dtype, shape, [])).boxes.append(box)
            file_by_name[file.name] = file
        self.index, self.files = TensorIndex(entry_by_name), [file_by_name[name] for name in sorted(file_by_name)]


class GatheringWriter(ShardWriter):
    """Writes checkpoints of the layout `whole`: the first rank gathers one tensor after the other and writes it.

    element_order: the method `Checkpointable.element_order` of the engine: the order of a tensor in `Task.model`.
    """

    gathers_tensors = True

    def __init__(self, folder: Path, group: dist.ProcessGroup, element_order: ElementOrder) -> None:
        super().__init__(folder, 0)
        self._path = folder / "whole.bin"
        self._group, self._element_order = group, element_order
        self._plans: list[SavePlan] = []  # the plans of all ranks; only the first rank has them

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._plans = plans
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._plans:
            return _make_completed_future(self._write_boxes(self._gather_tensors(planner)))
        for item in sorted(plan.items, key=_make_sort_key):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            dist.send(_view_as_bytes(tensor), group_dst=0, group=self._group)
        return _make_completed_future([])

    def _gather_tensors(self, planner: SavePlanner) -> Iterator[tuple[WriteItem, torch.Tensor]]:
        sorted_items = sorted(
            ((_make_sort_key(item), rank, item) for rank, plan in enumerate(self._plans) for item in plan.items),
            key=lambda entry: (entry[0][0], entry[1], entry[0][1]),
        )
        for position, (_, rank, item) in enumerate(sorted_items):
            tensor_data, tensor_name = item.tensor_data, item.index.fqn
            assert tensor_data is not None
            assert tensor_data.chunk is not None
            is_first_box = position == 0 or sorted_items[position - 1][2].index.fqn != tensor_name
            is_last_box = position == len(sorted_items) - 1 or sorted_items[position + 1][2].index.fqn != tensor_name
            if is_first_box:
                whole_tensor = torch.empty(tensor_data.size, dtype=tensor_data.properties.dtype)
            box = torch.empty(tensor_data.chunk.sizes, dtype=tensor_data.properties.dtype)
            if rank == 0:
                local_box = planner.resolve_data(item)
                assert isinstance(local_box, torch.Tensor)
                box.copy_(local_box)
            else:
                dist.recv(_view_as_bytes(box), group_src=rank, group=self._group)
            whole_tensor[
                tuple(
                    slice(offset, offset + length) for offset, length in zip(tensor_data.chunk.offsets, tensor_data.chunk.sizes)
                )
            ] = box
            if is_last_box:
                element_order = self._element_order(tensor_name, whole_tensor.shape)
                whole_tensor = whole_tensor if element_order is None else whole_tensor.flatten()[element_order]
                yield (
                    WriteItem(MetadataIndex(tensor_name, [0] * whole_tensor.dim()), item.type, tensor_data=item.tensor_data),
                    whole_tensor,
                )


class BoxReader(_FixedFolder, StorageReader):
    """Reads checkpoints: maps the files into memory and copies the boxes that overlap with the parts of this rank.

    folder: the folder of the checkpoint. file_sizes: file name -> bytes of the file. state: the parts to read.
    element_order: for the layout `whole`, the method `Checkpointable.element_order` of the engine; it allows that a tensor is
    read in another shape with the same number of elements. For the layout `sharded`, None.
    """

    def __init__(
        self, folder: Path, index: TensorIndex, file_sizes: dict[str, int], state: State, element_order: ElementOrder | None
    ) -> None:
        self._folder, self._size_by_file, self._element_order = folder, file_sizes, element_order
        self._entries = {name: self._reshape_entry(entry, state.get(name)) for name, entry in index.tensors.items()}
        self._mapped_files: dict[str, torch.Tensor] = {}

    def _reshape_entry(self, entry: TensorEntry, part: Any) -> TensorEntry:
        if self._element_order is None or part is None or math.prod(part.shape) != math.prod(entry.shape):
            return entry
        shape = list(part.shape)
        box = msgspec.structs.replace(entry.boxes[0], offsets=[0] * len(shape), sizes=shape)
        return msgspec.structs.replace(entry, shape=shape, boxes=[box])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the caller has already read the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata_by_name = {}
        for name, entry in self._entries.items():
            boxes = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            metadata_by_name[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        return Metadata(dict(metadata_by_name))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            tensor_name = item.storage_index.fqn
            tensor = self._read_box(tensor_name, list(item.storage_index.offset or ()))
            for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                tensor = tensor.narrow(dimension, begin, length)
            planner.resolve_tensor(item).copy_(tensor)
        return _make_completed_future(None)

    def _read_box(self, tensor_name: str, offsets: list[int]) -> torch.Tensor:
        entry = self._entries[tensor_name]
        box = next(box for box in entry.boxes if box.offsets == offsets)
        if box.file not in self._mapped_files:
            file_path = str(self._folder / box.file)
            self._mapped_files[box.file] = torch.from_file(
                file_path, shared=False, size=self._size_by_file[box.file], dtype=torch.uint8
            )
        dtype = getattr(torch, entry.dtype)
        box_content = self._mapped_files[box.file].narrow(0, box.begin, math.prod(box.sizes) * dtype.itemsize).view(dtype)
        if (
            self._element_order is not None
            and (element_order := self._element_order(tensor_name, torch.Size(entry.shape))) is not None
        ):
            box_content = torch.empty_like(box_content).index_copy_(0, element_order.flatten(), box_content)
        return box_content.view(box.sizes)


def _make_sort_key(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _make_completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
