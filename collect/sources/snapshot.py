"""Reads the snapshot of the CUDA allocator that a rank writes if the cell has `instruments: {memory: snapshot}`.

A snapshot has the allocator's segments (pieces of GPU memory, each divided into blocks) after a step, and the history of the
step: one entry for each time when memory was allocated or freed. Its stack traces are not read. The pickles that torch itself
writes contain the same dictionaries (`torch.cuda.memory._dump_snapshot`); nothing in them is executed.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import Any

import msgspec

from collect.sources import plain_pickle
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.record_types import Count

MOST_JSON_BYTES = 1 << 29  # a file whose JSON text is larger is not read, because it would need too much memory
# The largest pickle of another program. Its values need about ten times as much memory as the file.
MOST_PICKLE_BYTES = 1 << 28
MOST_PICKLE_VALUES = 50_000_000  # the most values in such a pickle; a small pickle may contain the same list many times
SNAPSHOT_SUFFIX = ".snapshot.json.gz"
SIZE_CLASSES = {"256 MiB or more": 1 << 28, "32 to 256 MiB": 1 << 25, "1 to 32 MiB": 1 << 20, "below 1 MiB": 0}
"""Name of a class of allocations -> the smallest size of its allocations in bytes. The class of the largest comes first."""
BEFORE_STEP = "from before the step"
ACTIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")  # states of blocks that are in use
_RESERVED_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}  # how reserved memory changes


class AllocatorBlock(msgspec.Struct, frozen=True):
    """A piece of a segment."""

    size: Count
    """In bytes."""
    state: str


class AllocatorSegment(msgspec.Struct, frozen=True):
    """A piece of GPU memory that the allocator reserved."""

    total_size: Count
    """In bytes."""
    blocks: list[AllocatorBlock]


class HistoryEntry(msgspec.Struct, frozen=True):
    """An entry of the allocator's history."""

    action: str
    addr: int = 0
    """The address of the block or segment."""
    size: Count = 0
    """In bytes."""


class AllocatorSnapshot(msgspec.Struct, frozen=True):
    """The file `memory/rank-RRRRR.snapshot.json.gz` of a run; its other fields are ignored."""

    rank: int
    step: int
    """The observed step."""
    segments: list[AllocatorSegment]
    device_traces: list[list[HistoryEntry]]
    """The history of each GPU; only the rank's own GPU has entries."""

    @property
    def entries(self) -> list[HistoryEntry]:
        """The history of the GPU that has most entries."""
        return max(self.device_traces, key=len, default=[])

    @property
    def active_bytes(self) -> int:
        """Bytes of the blocks that are in use after the step."""
        return sum(block.size for segment in self.segments for block in segment.blocks if block.state in ACTIVE_STATES)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments after the step."""
        return sum(segment.total_size for segment in self.segments)


class AllocatorHistory(msgspec.Struct, frozen=True):
    """Memory after each entry of the history, in bytes. All lists have one element more than there are entries: the first is
    the state before the step."""

    active_bytes_by_class: dict[str, list[int]]
    """For each class of SIZE_CLASSES, and for BEFORE_STEP, the bytes of blocks in use."""
    reserved_bytes: list[int]
    """The bytes of all segments."""

    @property
    def in_use_bytes(self) -> list[int]:
        """The bytes of all blocks in use."""
        return [sum(class_sizes) for class_sizes in zip(*self.active_bytes_by_class.values(), strict=True)]


def read_snapshot(path: Path) -> AllocatorSnapshot | None:
    """The snapshot in a file; None if there is no file, if it is damaged or too large, or if its folder is a symbolic link."""
    if path.parent.is_symlink():
        return None
    try:
        with files.open_regular(path) as compressed_file, gzip.GzipFile(fileobj=compressed_file) as json_file:
            json_text = json_file.read(MOST_JSON_BYTES + 1)
        return get_decoder(AllocatorSnapshot).decode(json_text) if len(json_text) <= MOST_JSON_BYTES else None
    except (OSError, EOFError, zlib.error, *DECODE_FAULTS):
        return None


def read_snapshot_document(path: Path) -> dict[str, Any]:
    """The whole document of a snapshot that the user names, with its stack traces: a file of ours, or a pickle of torch.

    A pickle has neither rank nor step, so both are 0. Raises InputError if the file is no snapshot, WorkspaceError if it cannot
    be read."""
    with files.as_workspace_error("read"):
        file_content = files.read(path, MOST_PICKLE_BYTES, follow_links=True)
    try:
        if path.name.endswith(SNAPSHOT_SUFFIX):
            json_text = gzip.GzipFile(fileobj=io.BytesIO(file_content)).read(MOST_JSON_BYTES)
            snapshot_document = msgspec.json.decode(json_text, type=dict[str, Any])
        else:
            pickled_value = plain_pickle.read_plain_pickle(file_content)
            if not isinstance(pickled_value, dict):
                raise ValueError("it contains no dictionary")
            snapshot_document = {"schema": 1, "rank": 0, "step": 0, "segments": pickled_value.get("segments")}
            snapshot_document["device_traces"] = pickled_value.get("device_traces", [])
            _must_be_small(snapshot_document)
        msgspec.convert(snapshot_document, AllocatorSnapshot)
    except (ValueError, EOFError, zlib.error, RecursionError, gzip.BadGzipFile, OverflowError) as error:
        raise InputError(
            f"{path}: is no snapshot of the CUDA allocator: {str(error).rstrip('.')}. Allowed: the pickle that "
            "torch.cuda.memory._dump_snapshot writes, or memory/rank-00000.snapshot.json.gz of a run."
        ) from None
    return snapshot_document


def is_snapshot_file(path: Path) -> bool:
    """Whether a file that the user names is a pickle, or has the name of a snapshot of ours. False if it cannot be read."""
    try:
        with files.open_regular(path, follow_links=True) as file:
            first_bytes = file.read(2)
    except OSError:
        return False
    is_pickle = first_bytes[:1] == plain_pickle.PICKLE_MAGIC and 2 <= first_bytes[-1] <= plain_pickle.NEWEST_PROTOCOL
    return is_pickle or path.name.endswith(SNAPSHOT_SUFFIX)


def _must_be_small(snapshot_document: Any) -> None:
    """Raises ValueError if a document has more than MOST_PICKLE_VALUES values; a list in several places counts each time."""
    unvisited, value_count = [snapshot_document], 0
    while unvisited:
        value = unvisited.pop()
        inner_values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        value_count += len(inner_values)
        if value_count > MOST_PICKLE_VALUES:
            raise ValueError(f"it has more than {MOST_PICKLE_VALUES:,} values")
        unvisited.extend(inner_values)


def replay_history(snapshot: AllocatorSnapshot) -> AllocatorHistory:
    """Follow the history from its first to its last entry.

    The segments of the snapshot show the state after the step. The state before the step is computed from it by undoing the
    entries. A block is in use from `alloc` to `free_completed`. BEFORE_STEP counts the blocks from before the first
    entry."""
    history_entries = snapshot.entries
    entry_signs = [{"alloc": 1, "free_completed": -1}.get(entry.action, 0) for entry in history_entries]
    reserved_growths = [_RESERVED_SIGNS.get(entry.action, 0) * entry.size for entry in history_entries]
    bytes_by_class = dict.fromkeys((BEFORE_STEP, *SIZE_CLASSES), 0)
    growth_in_step = sum(entry_sign * entry.size for entry_sign, entry in zip(entry_signs, history_entries, strict=True))
    bytes_by_class[BEFORE_STEP] = snapshot.active_bytes - growth_in_step
    curve_by_class = {name: [class_bytes] for name, class_bytes in bytes_by_class.items()}
    reserved_curve = [snapshot.reserved_bytes - sum(reserved_growths)]
    class_by_address: dict[int, str] = {}  # address of a block that the step allocated -> its class
    for entry_sign, entry, reserved_growth in zip(entry_signs, history_entries, reserved_growths, strict=True):
        if entry_sign > 0:
            class_by_address[entry.addr] = next(name for name, least_bytes in SIZE_CLASSES.items() if entry.size >= least_bytes)
            bytes_by_class[class_by_address[entry.addr]] += entry.size
        elif entry_sign < 0:
            bytes_by_class[class_by_address.pop(entry.addr, BEFORE_STEP)] -= entry.size
        for name, class_bytes in bytes_by_class.items():
            curve_by_class[name].append(class_bytes)
        reserved_curve.append(reserved_curve[-1] + reserved_growth)
    return AllocatorHistory(curve_by_class, reserved_curve)
