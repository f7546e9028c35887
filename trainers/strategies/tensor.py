"""Tensor parallelism: each block's linear layers are split over the ranks, and all ranks work on the same batch."""

from __future__ import annotations

from functools import partial

from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.model.precision import ALL
from trainers.strategy import Strategy
from trainers.strategy_options import TensorOptions
from trainers.theory.mesh import list_mesh_terms
from trainers.workload import Workload


def refuse_tensor_split(cell: Cell) -> str | None:
    """Why the blocks of a cell's workload cannot be split over the cell's tp ranks, as a sentence, or None."""
    workload = menu.find_workload_of_cell(cell)
    if workload.file is not None:
        return _refuse_own_split(cell, workload)
    if workload.heads is None:
        workload_names = ", ".join(name for name, other in menu.load_workloads().items() if other.heads is not None)
        return (
            f"{cell.strategy} cannot split {cell.workload}: it defines no split of its layers. "
            f"Allowed workloads: {workload_names}."
        )
    heads = cell.options[workload.heads]
    assert isinstance(heads, int)
    if heads % cell.tp:
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        return f"{cell.workload} has {heads} attention heads ({workload.heads}), found tp: {cell.tp}. Allowed tp: {allowed}."
    return None


def _refuse_own_split(cell: Cell, workload: Workload) -> str | None:
    """As `refuse_tensor_split`, for a workspace's own workload. If a cell changes the options of the workload, the sizes of
    layers may be different; in this case, only the ranks check the sizes."""
    if not workload.tensor_degrees and workload.is_data:
        return (
            f"{cell.strategy} cannot split {cell.workload}: no split of its layers is known (docs/model-by-configuration.md)."
        )
    if not workload.tensor_degrees:
        return (
            f"{cell.strategy} cannot split {cell.workload}: its file defines no function tensor_parallel(block, ranks), which "
            "names the layers to split (docs/own-models.md)."
        )
    if cell.tp > 1 and (workload.is_data or workload.has_default_options(cell)) and cell.tp not in workload.tensor_degrees:
        allowed = ", ".join(map(str, (1, *workload.tensor_degrees)))
        return f"the layers of {cell.workload} cannot be split over tp: {cell.tp} ranks. Allowed tp: {allowed}."
    return None


def refuse_sequence_slices(cell: Cell) -> str | None:
    """Why the positions of a sequence cannot be split over the cell's tp ranks, as a sentence, or None.

    Always None if the option sequence_parallel is off.
    """
    if not TensorOptions(cell.options).sequence_parallel:
        return None
    if cell.seq_len is None:
        return f"sequence_parallel: {cell.workload} has no sequences. Allowed: leave it out."
    if cell.seq_len % cell.tp:
        return (
            f"sequence_parallel: tp: {cell.tp} does not divide the {cell.seq_len} positions of a sequence (seq_len). "
            "Allowed: a seq_len that is a multiple of tp, or false."
        )
    return None


def refuse(cell: Cell) -> str | None:
    return refuse_tensor_split(cell) or refuse_sequence_slices(cell)


VARIANTS = (
    Strategy(
        name="tp",
        summary="each block's linear layers split over the ranks, by columns, then by rows (PyTorch parallelize_module)",
        precisions=ALL,
        refuse=refuse,
        engine="trainers.engines.tensor",
        degrees=("tp",),
        switches=("activation_checkpointing", "max_grad_norm"),
        theory_of_communication=partial(list_mesh_terms, pipelined=False),
        options=TensorOptions.list_options(),
    ),
)
