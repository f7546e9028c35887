"""Makes tables of profiled cells: idle time by cause, phases, modules, memory of devices, matrix products, and attention."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from collect.findings.answer_section import REPEATS_COLUMN, AnswerSection, make_single_table_maker
from collect.findings.row import CellRow
from collect.findings.trace_answers import list_profiled_runs
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.traces.answer_columns import (
    ACHIEVED_FLOPS_COLUMN,
    ATTENTION_COLUMNS,
    MOST_ROWS,
    SIZE_COLUMNS,
    make_mib_column,
    make_name_column,
)
from collect.traces.attention import sum_attention
from collect.traces.layers import count_shown_layers, sum_layers
from collect.traces.matrix_products import sum_products
from collect.traces.memory_use import MemoryUse
from collect.traces.phases import PHASES
from collect.traces.rank_analysis import RankAnalysis
from shardlab.terminal.table import Column, Table


class IdleTime(msgspec.Struct, frozen=True, kw_only=True):
    """The idle time of a profiled step of a cell by cause, as means over profiled ranks and n repeats."""

    cell: str
    n: int
    """Number of repeats."""
    idle_ms: float
    """The sum of the four causes."""
    host_ms: float
    """The host launched nothing."""
    launching_ms: float
    """The host was inside a launching call; 0 on a CPU."""
    communication_ms: float
    """Waiting for communication."""
    other_ms: float
    """Idle for another reason."""
    launch_delay_us: float | None
    """From the end of a launch to the start of the work; None on a CPU."""


class PhaseOfStep(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a profiled step of a cell, as means over profiled ranks and n repeats.

    The times of a GPU are None on a CPU.
    """

    cell: str
    phase: str
    """Data, forward, backward, optimizer or other."""
    n: int
    """Number of repeats."""
    host_ms: float
    """Time of the main thread."""
    gpu_ms: float | None
    """Time of the kernels and memory operations that the phase launched."""
    compute_ms: float | None
    """Time of the kernels that compute."""
    communication_ms: float | None
    """Time of the collectives."""


class LayerOfStep(msgspec.Struct, frozen=True, kw_only=True):
    """A module of the model in a profiled step of a cell, with all modules that it calls; means over ranks and n repeats.

    The times are those of the GPU; on a CPU, those of the host.
    """

    cell: str
    layer: str
    """The name of the module in the trace."""
    parent: str
    """The module that calls it; "" if no module calls it."""
    depth: int
    """How deep the module is nested: the number of modules that contain it."""
    n: int
    """Number of repeats."""
    calls: float
    """Calls per step in forward."""
    forward_ms: float
    """Time of the forward pass."""
    backward_ms: float | None
    """Time of the backward pass; None: the trace has no sequence numbers of autograd."""
    communication_ms: float | None
    """Time of the collectives that the module launched; None on a CPU."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the allocator of one kind of device allocated in the profiled steps of a cell, in bytes, over ranks and repeats."""

    cell: str
    device: str
    """The kind of device, such as cuda; for a CPU, only memory allocated since the start of the profiler counts."""
    n: int
    """Number of repeats."""
    start_bytes: float
    """Allocated at the start of the first profiled step; mean over ranks and repeats."""
    peak_bytes: float
    """The most that was allocated on a rank; mean over repeats."""
    peak_reserved_bytes: float | None
    """The most that was reserved on a rank; mean over repeats."""


class ProductOfStep(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product in a profiled step of a cell, over ranks and repeats. A call computes 2 * batch * m * n * k FLOPs."""

    cell: str
    operator: str
    """Name of the operator, such as aten::mm."""
    batch: int
    """Number of products in a call."""
    m: int
    """Rows of the first matrix."""
    n: int
    """Columns of the second matrix."""
    k: int
    """Columns of the first matrix, which are the rows of the second."""
    repeats: int
    """Number of repeats."""
    calls: float
    """Number of calls with a known time, per step and rank."""
    dtype: str
    """The types of the factors; "": not recorded."""
    ms: float
    """Time per step and rank, without copies."""
    copy_ms: float
    """Time of the copies that the operator launched, per step and rank."""
    flops_per_s: float | None
    """Achieved FLOP/s; None if no time is known."""


class AttentionOfStep(msgspec.Struct, frozen=True, kw_only=True):
    """The attention in a profiled step of a cell by implementation, over profiled ranks and n repeats."""

    cell: str
    backend: str
    """The implementation: flash, efficient, cudnn, flex, fused or math."""
    backward: bool
    """Whether the times are those of the backward pass."""
    name: str
    """Name of the operator, or of the kernel if no operator launched it."""
    n: int
    """Number of repeats."""
    calls: float
    """Calls per step and rank."""
    ms: float | None
    """Time per step and rank."""
    kernels: list[str]
    """The names of the kernels; empty on a CPU."""


def list_idle_times(rows: Sequence[CellRow]) -> list[IdleTime]:
    """The idle time by cause of every cell whose traces record the causes."""
    idle_times = []
    for row in rows:
        cause_estimates = [row.metrics.get(f"idle_{cause}_ms") for cause in ("host", "launching", "communication", "other")]
        host, launching, communication, other = cause_estimates
        if host is None or launching is None or communication is None or other is None:
            continue
        launch_delay = row.metrics.get("launch_delay_us")
        idle_times.append(
            IdleTime(
                cell=row.id,
                n=host.n,
                idle_ms=host.value + launching.value + communication.value + other.value,
                host_ms=host.value,
                launching_ms=launching.value,
                communication_ms=communication.value,
                other_ms=other.value,
                launch_delay_us=launch_delay.value if launch_delay else None,
            )
        )
    return idle_times


def list_phase_times(loaded: LoadedMatrix) -> list[PhaseOfStep]:
    """The times of the phases of each cell whose traces mark the steps of the profiler, in the order of a step."""
    return [phase_time for cell in loaded.cells for phase in PHASES if (phase_time := _average_phase(cell, phase)) is not None]


def _average_phase(cell: LoadedCell, phase: str) -> PhaseOfStep | None:
    ranks_of_runs = [run.ranks for run in list_profiled_runs(cell)]
    phase_records = [(time, rank) for ranks in ranks_of_runs for rank in ranks for time in rank.phases if time.phase == phase]
    if not phase_records:
        return None
    step_count = sum(rank.steps for ranks in ranks_of_runs for rank in ranks)

    def average_ms(field: str) -> float | None:
        recorded_ns = [getattr(time, field) for time, _ in phase_records]
        return None if None in recorded_ns else sum(recorded_ns) / step_count / 1e6

    host_ms = average_ms("host_ns")
    assert host_ms is not None
    return PhaseOfStep(
        cell=cell.id,
        phase=phase,
        n=sum(any(time.phase == phase for rank in ranks for time in rank.phases) for ranks in ranks_of_runs),
        host_ms=host_ms,
        gpu_ms=average_ms("device_ns"),
        compute_ms=average_ms("compute_ns"),
        communication_ms=average_ms("communication_ns"),
    )


def list_layer_times(loaded: LoadedMatrix) -> list[LayerOfStep]:
    """The modules of every cell whose traces record them: a tree by time."""
    return [layer for cell in loaded.cells for layer in list_cell_layers(cell)]


def list_cell_layers(cell: LoadedCell) -> list[LayerOfStep]:
    """The modules of a cell as a tree, the longest first; empty if its traces do not record them."""
    ranks, run_count, step_count = _select_ranks_with(cell, "layers")
    return [
        LayerOfStep(
            cell=cell.id,
            layer=layer.name,
            parent=layer.parent,
            depth=layer.depth,
            n=run_count,
            calls=layer.calls / step_count,
            forward_ms=layer.forward / step_count / 1e6,
            backward_ms=None if layer.backward is None else layer.backward / step_count / 1e6,
            communication_ms=None if layer.communication_ns is None else layer.communication_ns / step_count / 1e6,
        )
        for layer in sum_layers(layer for rank in ranks for layer in rank.layers)
    ]


def list_device_memories(loaded: LoadedMatrix) -> list[DeviceMemory]:
    """The memory of every cell whose traces record it, by kind of device."""
    memories = []
    for cell in loaded.cells:
        runs_by_kind: dict[str, list[list[MemoryUse]]] = {}
        for run in list_profiled_runs(cell):
            run_uses_by_kind: dict[str, list[MemoryUse]] = {}
            for use in (use for rank in run.ranks for use in rank.memory):
                run_uses_by_kind.setdefault(use.device.partition(":")[0], []).append(use)
            for device_kind, uses in run_uses_by_kind.items():
                runs_by_kind.setdefault(device_kind, []).append(uses)
        for device_kind, runs in sorted(runs_by_kind.items()):
            reserved_peaks = [[use.peak_reserved_bytes for use in uses if use.peak_reserved_bytes is not None] for uses in runs]
            memories.append(
                DeviceMemory(
                    cell=cell.id,
                    device=device_kind,
                    n=len(runs),
                    start_bytes=statistics.fmean(use.start_bytes for uses in runs for use in uses),
                    peak_bytes=statistics.fmean(max(use.peak_bytes for use in uses) for uses in runs),
                    peak_reserved_bytes=statistics.fmean(map(max, reserved_peaks)) if all(reserved_peaks) else None,
                )
            )
    return memories


def list_matrix_products(loaded: LoadedMatrix) -> list[ProductOfStep]:
    """The matrix products of every cell whose traces record shapes. The products of a cell are ordered by time, the longest
    first."""
    return [product for cell in loaded.cells for product in list_cell_products(cell)]


def list_cell_products(cell: LoadedCell) -> list[ProductOfStep]:
    """The matrix products of a cell, the longest time first; empty if its traces do not record shapes."""
    ranks, repeat_count, step_count = _select_ranks_with(cell, "products")
    return [
        ProductOfStep(
            cell=cell.id,
            operator=product.operator,
            batch=product.batch,
            m=product.m,
            n=product.n,
            k=product.k,
            repeats=repeat_count,
            calls=product.calls / step_count,
            dtype=product.dtype,
            ms=product.total_ns / step_count / 1e6,
            copy_ms=product.copy_ns / step_count / 1e6,
            flops_per_s=product.flops_per_s,
        )
        for product in sum_products(product for rank in ranks for product in rank.products)
    ]


def list_attention_uses(loaded: LoadedMatrix) -> list[AttentionOfStep]:
    """The attention of every cell that was profiled by steps. The kinds of attention of a cell are ordered by time, longest
    first."""
    return [use for cell in loaded.cells for use in list_cell_attention(cell)]


def list_cell_attention(cell: LoadedCell) -> list[AttentionOfStep]:
    """The attention of a cell, the longest time first; empty if its traces show none."""
    ranks, run_count, step_count = _select_ranks_with(cell, "attention")
    return [
        AttentionOfStep(
            cell=cell.id,
            backend=attention_use.backend,
            backward=attention_use.backward,
            name=attention_use.name,
            n=run_count,
            calls=attention_use.calls / step_count,
            ms=None if attention_use.total_ns is None else attention_use.total_ns / step_count / 1e6,
            kernels=attention_use.kernels,
        )
        for attention_use in sum_attention(attention_use for rank in ranks for attention_use in rank.attention)
    ]


def _select_ranks_with(cell: LoadedCell, recorded_field: str) -> tuple[list[RankAnalysis], int, int]:
    """The ranks of a cell whose traces recorded `recorded_field`, such as `layers`.

    Returns (the analyses of these ranks in all repeats, number of repeats with such a rank, number of steps that they
    profiled).
    """
    ranks_of_runs = [[rank for rank in run.ranks if getattr(rank, recorded_field)] for run in list_profiled_runs(cell)]
    selected_ranks = [rank for run in ranks_of_runs for rank in run]
    return selected_ranks, sum(map(bool, ranks_of_runs)), sum(rank.steps for rank in selected_ranks)


_LAYER_COLUMNS: list[Column[LayerOfStep]] = [
    make_name_column("Module", lambda layer: layer.layer),
    make_name_column("Called by", lambda layer: layer.parent),
    Column("Calls", lambda layer: layer.calls),
    Column("Forward", lambda layer: layer.forward_ms, "ms"),
    Column("Backward", lambda layer: layer.backward_ms, "ms"),
    Column("Communication", lambda layer: layer.communication_ms, "ms"),
]


def _make_layer_tables(layers: Sequence[LayerOfStep], label_by_cell: Mapping[str, str]) -> list[Table[Any]]:
    layers_by_cell = {cell: list(group) for cell, group in groupby(layers, key=lambda layer: layer.cell)}
    return [
        Table(label_by_cell[cell], _LAYER_COLUMNS, rows, note=f"{len(rows)} modules", most_rows=count_shown_layers(rows))
        for cell, rows in layers_by_cell.items()
    ]


# The parts of the page of a report, by the name of the list of the summary that they show.
SECTIONS = {
    "idle": AnswerSection(
        "Idle time by cause",
        "Exact values; mean step over profiled ranks and repeats. Host: the host launched nothing that waits to run. "
        "In launching calls: the host is inside the call that launches the next work. Other: launched work does not "
        "start yet. Launch delay: from the end of the launch to the start of the work, mean.",
        make_single_table_maker(
            Column("Idle", lambda time: time.idle_ms, "ms"),
            Column("Host launched nothing", lambda time: time.host_ms, "ms"),
            Column("In launching calls", lambda time: time.launching_ms, "ms"),
            Column("Waiting for communication", lambda time: time.communication_ms, "ms"),
            Column("Other", lambda time: time.other_ms, "ms"),
            Column("Launch delay", lambda time: time.launch_delay_us, "us"),
            REPEATS_COLUMN,
        ),
    ),
    "phases": AnswerSection(
        "Phases of a step",
        "Exact values; mean step over profiled ranks and repeats. Host: the time of the main thread. GPU: the union "
        "of all kernels and memory operations that the phase launched; two phases may run at the same time.",
        make_single_table_maker(
            Column("Phase", lambda time: time.phase),
            Column("Host", lambda time: time.host_ms, "ms"),
            Column("GPU", lambda time: time.gpu_ms, "ms"),
            Column("Compute", lambda time: time.compute_ms, "ms"),
            Column("Communication", lambda time: time.communication_ms, "ms"),
            REPEATS_COLUMN,
        ),
    ),
    "layers": AnswerSection(
        "Modules of the model",
        "Exact values; mean step over profiled ranks and repeats. The time of a module contains that of the modules "
        "that it calls. GPU: kernels that compute and memory operations that the module launched; CPU: the time of the host.",
        _make_layer_tables,
        is_folded=True,
    ),
    "device_memory": AnswerSection(
        "Memory of the profiled steps",
        "As PyTorch's allocators count it; the rank with the highest peak, mean over repeats. CPU: what was allocated "
        "since the recording began.",
        make_single_table_maker(
            Column("Device", lambda use: use.device),
            make_mib_column("At the start", lambda use: use.start_bytes),
            make_mib_column("Peak", lambda use: use.peak_bytes),
            make_mib_column("Peak reserved", lambda use: use.peak_reserved_bytes),
            REPEATS_COLUMN,
        ),
    ),
    "matrix_products": AnswerSection(
        "Matrix products",
        "Over profiled ranks and repeats. FLOPs of a call: 2 M N K times the batch; time: of the kernels that the "
        "operator launched, without copies; on a CPU of the operator.",
        make_single_table_maker(
            *SIZE_COLUMNS,
            Column("Time", lambda product: product.ms, "ms"),
            Column("Copies", lambda product: product.copy_ms, "ms"),
            ACHIEVED_FLOPS_COLUMN,
            Column("n", lambda product: product.repeats),
            most_rows=MOST_ROWS,
        ),
    ),
    "attention": AnswerSection(
        "Attention",
        "Which implementation ran, by operators and kernels; mean step over profiled ranks and repeats. Time: of the "
        "kernels, on a CPU of the operators.",
        make_single_table_maker(*ATTENTION_COLUMNS, Column("Time", lambda use: use.ms, "ms"), REPEATS_COLUMN),
    ),
}
