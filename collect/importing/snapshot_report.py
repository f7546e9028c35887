"""Shows a snapshot of the CUDA allocator that the user names: reserved memory, memory in use, and the peak of the history."""

from __future__ import annotations

from pathlib import Path

import msgspec

from collect.sources import snapshot
from collect.sources.snapshot import AllocatorSnapshot
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.terminal.table import Column, Table


def show_snapshot(path: Path, output: Output) -> int:
    """Print the table or the JSON document of a snapshot. Returns exit code 0. Raises InputError if the file is no snapshot."""
    allocator_snapshot = msgspec.convert(snapshot.read_snapshot_document(path), AllocatorSnapshot)
    history = snapshot.replay_history(allocator_snapshot)
    in_use_bytes = history.in_use_bytes
    peak_index = in_use_bytes.index(max(in_use_bytes))
    bytes_at_peak = {name: curve[peak_index] for name, curve in history.active_bytes_by_class.items() if curve[peak_index]}
    sizes = [
        ("reserved", allocator_snapshot.reserved_bytes),
        ("in use", allocator_snapshot.active_bytes),
        ("reserved, peak of the history", max(history.reserved_bytes)),
        ("in use, peak of the history", in_use_bytes[peak_index]),
        *((f"  of this, blocks {name}", size_bytes) for name, size_bytes in bytes_at_peak.items()),
    ]
    size_unit, unit_bytes = notation.choose_unit([size_bytes for _, size_bytes in sizes])
    columns: list[Column[tuple[str, int]]] = [
        Column("Memory", lambda row: row[0]),
        Column("Size", lambda row: row[1], size_unit, unit_bytes, digits=3),
    ]
    output.show_table(Table(f"{path.name}: a snapshot of the CUDA allocator", columns, sizes, "snapshot"))
    entry_count, segment_count = len(allocator_snapshot.entries), len(allocator_snapshot.segments)
    output.print_remark(
        f"{segment_count:,} segments, {entry_count:,} entries in the history. `collect import {path}` makes a run of "
        "it, which the report draws."
    )
    byte_counts = dict(zip(("reserved", "in_use", "peak_reserved", "peak_in_use"), (size_bytes for _, size_bytes in sizes)))
    output.print_document(
        {"file": str(path), "segments": segment_count, "entries": entry_count, "bytes": byte_counts, "at_peak": bytes_at_peak}
    )
    return 0
