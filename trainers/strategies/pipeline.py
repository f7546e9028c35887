"""Pipeline parallelism: each rank has consecutive blocks as a stage, and micro-batches go through the stages in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardlab.matrix.cell import Cell
from shardlab.registry import Option
from trainers import menu
from trainers.model.precision import ALL
from trainers.strategy import SWITCHES, Strategy
from trainers.theory.mesh import list_mesh_terms
from trainers.workload import Workload


def refuse_stages(cell: Cell) -> str | None:
    """Why the blocks of a cell's workload cannot be divided into stages, as a sentence, or None."""
    workload, stages_per_rank = menu.find_workload_of_cell(cell), cell.stages_per_rank
    stage_count = cell.pp * stages_per_rank
    if workload.file is not None:
        return _refuse_own_stages(cell, workload, stage_count)
    if workload.blocks is None:
        workload_names = ", ".join(name for name, other in menu.load_workloads().items() if other.blocks is not None)
        return f"{cell.strategy} cannot divide {cell.workload} into pipeline stages. Allowed workloads: {workload_names}."
    blocks = cell.options[workload.blocks]
    assert isinstance(blocks, int)
    if stage_count > blocks:
        found_text = f"pp: {cell.pp}" + (f" with {stages_per_rank} stages per rank" if stages_per_rank > 1 else "")
        return (
            f"{cell.workload} has {blocks} blocks ({workload.blocks}), too few for {stage_count} stages: found {found_text}. "
            f"Allowed pp: up to {blocks // stages_per_rank}."
        )
    return None


def _refuse_own_stages(cell: Cell, workload: Workload, stage_count: int) -> str | None:
    """As `refuse_stages`, for a workspace's own workload. If a cell changes the options of the workload, the number of blocks
    may be different; in this case, only the ranks check the number."""
    if not workload.most_stages and workload.is_data:
        return (
            f"{cell.strategy} cannot divide {cell.workload} into pipeline stages: where it may be cut is not known "
            "(docs/model-by-configuration.md)."
        )
    if not workload.most_stages:
        return (
            f"{cell.strategy} cannot divide {cell.workload} into pipeline stages: its file defines no function "
            "pipeline(model), which names the modules before and behind the blocks (docs/own-models.md)."
        )
    if stage_count > workload.most_stages and workload.has_default_options(cell):
        return f"{cell.workload} has {workload.most_stages} blocks, too few for {stage_count} stages (pp: {cell.pp})."
    return None


def refuse_1f1b_schedule(cell: Cell) -> str | None:
    """Why the 1F1B schedule (one forward, one backward) is not possible for a cell, as a sentence, or None.

    The schedule needs at least as many micro-batches as stages.
    """
    if cell.gradient_accumulation_steps < cell.pp:
        return (
            f"the 1F1B schedule needs at least one micro-batch per step for each of {cell.pp} stages: "
            f"found {cell.gradient_accumulation_steps} per step. Allowed: microbatches from {cell.pp}."
        )
    return None


def _refuse_1f1b(cell: Cell) -> str | None:
    return refuse_stages(cell) or refuse_1f1b_schedule(cell)


def _refuse_interleaved(cell: Cell) -> str | None:
    pass_count = cell.gradient_accumulation_steps
    round_count = max(1, pass_count // cell.pp)
    if pass_count % round_count:
        return (
            f"the interleaved schedule cannot divide {pass_count} micro-batches per step into {round_count} equal rounds "
            f"on {cell.pp} ranks. Allowed: a multiple of {cell.pp}."
        )
    return refuse_stages(cell)


def _make_strategy(name: str, schedule: str, summary: str, refuse: Callable[[Cell], str | None], *options: Option) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        precisions=ALL,
        refuse=refuse,
        engine="trainers.engines.pipeline",
        settings={"schedule": schedule},
        degrees=("pp",),
        switches=SWITCHES,
        theory_of_communication=partial(list_mesh_terms, pipelined=True),
        options=options,
    )


VARIANTS = (
    _make_strategy("pp-gpipe", "gpipe", "all micro-batches forward, then all backward (Huang et al., 2019)", refuse_stages),
    _make_strategy(
        "pp-1f1b", "1f1b", "forward and backward alternate, so fewer activations are kept (PipeDream)", _refuse_1f1b
    ),
    _make_strategy(
        "pp-interleaved",
        "interleaved",
        "1F1B with several stages per rank: a smaller bubble, more messages (Narayanan et al., 2021)",
        _refuse_interleaved,
        Option("stages_per_rank", 2, "stages per rank: rank r holds stages r, r + pp, ...; 1 is pp-1f1b", least=2),
    ),
)
