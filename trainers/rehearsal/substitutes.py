"""Which cells cannot be rehearsed, and what a rehearsal replaces in a cell without changing its memory or communication."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab.files.image_files import LABEL_COUNT
from shardlab.matrix.cell import Cell
from trainers import menu
from trainers.proof.proof import MOST_COUNTED_STEPS
from trainers.strategies import zero
from trainers.workload_options import IMAGENET_CLASSES

if TYPE_CHECKING:
    from trainers.task import Task

OFFLOADING_OPTIONS = ("offload", "offload_optimizer", "offload_param")
CLASS_COUNTS = {"cifar10": LABEL_COUNT, "mnist": LABEL_COUNT, "imagenet": IMAGENET_CLASSES}


def refuse_rehearsal(cell: Cell) -> str | None:
    """Why a cell cannot be rehearsed, as a sentence, or None."""
    for name in OFFLOADING_OPTIONS:
        if cell.options.get(name, "none") != "none":
            return f"{name}: a rehearsal has one kind of memory and cannot tell tensors on the host from tensors on the GPU."
    if cell.options.get("sync_batch_norm") is True:
        return "sync_batch_norm: torch's SyncBatchNorm runs on a GPU only."
    if name := zero.name_quantizing_options(cell):
        return f"{name}: DeepSpeed must compile its quantiser and run it on a GPU."
    if (period := menu.find_strategy_of_cell(cell).communication_period(cell) or 0) > MOST_COUNTED_STEPS:
        return f"its communication repeats after {period} steps, and a rehearsal makes at most {MOST_COUNTED_STEPS}."
    return None


def substitute_settings(cell: Cell) -> tuple[Cell, list[str]]:
    """Replace the settings of a cell that a rehearsal cannot have. Returns (the changed cell; a sentence for each change)."""
    remarks: list[str] = []
    changes: dict[str, object] = {}
    if cell.compile:
        changes["compile"] = False
        remarks.append("rehearsed without torch.compile, which fuses operators and keeps fewer activations.")
    if cell.precision == "fp16" and cell.strategy.startswith("zero"):
        changes["precision"] = "bf16"
        remarks.append("rehearsed in bf16, whose numbers have the size of those of fp16: DeepSpeed's fp16 needs a GPU.")
    if cell.servers:
        remarks.append("parameter servers keep parameters in host memory and are not rehearsed.")
    return msgspec.structs.replace(cell, **changes), remarks


def make_synthetic_task(cell: Cell, data_path: Path) -> Task:
    """The task of a cell, with synthetic data of the same shape instead of the cell's data set, whose files may be missing."""
    data_set_name = cell.options.get("data")
    if data_set_name is None:
        return menu.find_workload_of_cell(cell).build(cell, data_path)
    options = {**cell.options, "data": "synthetic"}
    options |= {name: None for name in ("tokens_file", "subset") if name in options}
    task = menu.find_workload_of_cell(cell).build(msgspec.structs.replace(cell, options=options), data_path)
    if isinstance(data_set_name, str) and data_set_name in CLASS_COUNTS:
        from trainers.tasks.image_task import ImageTask  # it imports a library that language models do not need

        assert isinstance(task, ImageTask), "only these read labelled images"
        task.use_synthetic_images(CLASS_COUNTS[data_set_name])
    return task
