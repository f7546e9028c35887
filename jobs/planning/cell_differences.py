"""Lists the keys in which the cells of a plan differ, for the column `differs in` of `jobs plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardlab.matrix import cell_sizes
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.matrix.cell_names import map_cell_values
from trainers import menu

COLUMN_KEYS = {  # keys that are not compared: they have their own column in a plan, or follow from keys that have a column
    "workload", "strategy", "launcher", "gpus", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps",
    "gpu_batch_size", "steps", "epochs", "warmup_steps", "dp", "workload_code", "strategy_code", "fault",
}  # fmt: skip
# keys whose values are seconds -> the names of these keys in matrix files
FILE_KEYS_OF_SECONDS = {"time_limit_s": "time_limit", "hang_limit_s": "hang_limit"}


def describe_differences(cells: Sequence[AnyCell]) -> list[str]:
    """For each cell, a text with `key=value` for every key whose value is not the same in all cells; '' if there is none.

    An option that only some strategies or workloads have is compared among the cells that have the option. A key is left out
    if every cell has the default value of its strategy and workload, because the plan has columns for strategy and workload.
    """
    flat_cells = [_flatten_cell(cell) for cell in cells]
    defaults_of_cells = [_default_values(cell) for cell in cells]
    keys = dict.fromkeys(key for flat_cell in flat_cells for key in flat_cell if key not in COLUMN_KEYS)
    differing_keys = [
        key
        for key in keys
        if len({_format_value(flat_cell[key]) for flat_cell in flat_cells if key in flat_cell}) > 1
        and any(
            key in flat_cell and flat_cell[key] != cell_defaults.get(key, ...)
            for flat_cell, cell_defaults in zip(flat_cells, defaults_of_cells, strict=True)
        )
    ]
    return [
        ", ".join(
            f"{FILE_KEYS_OF_SECONDS.get(key, key)}={_format_value(flat_cell[key])}"
            for key in differing_keys
            if key in flat_cell
        )
        for flat_cell in flat_cells
    ]


def _flatten_cell(cell: AnyCell) -> dict[str, Any]:
    builtins_of_cell = msgspec.to_builtins(cell)
    limits_s = {key: builtins_of_cell[key] for key in FILE_KEYS_OF_SECONDS}
    clock_texts = {key: None if limit_s is None else cell_sizes.format_seconds(limit_s) for key, limit_s in limits_s.items()}
    instruments = {f"instruments.{name}": value for name, value in builtins_of_cell["instruments"].items()}
    return map_cell_values(builtins_of_cell) | clock_texts | instruments


def _default_values(cell: AnyCell) -> dict[str, Any]:
    """The default values that the strategy and the workload of a cell give to keys that a matrix does not set."""
    if not isinstance(cell, Cell):
        return {}
    workload = menu.find_workload_of_cell(cell)
    options = (*menu.find_strategy_of_cell(cell).options, *workload.options)
    option_defaults = {f"options.{option.name}": option.default for option in options}
    optimizer_defaults = {f"optimizer.{name}": value for name, value in msgspec.to_builtins(workload.optimizer).items()}
    return {"seq_len": workload.seq_len, **optimizer_defaults, **option_defaults}


def _format_value(value: Any) -> str:
    """A value as text: one word, or a list in brackets. Members of a dictionary that are None or False are left out."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        item_texts = [
            f"{key}: {_format_value(inner_value)}" for key, inner_value in value.items() if inner_value not in (None, False)
        ]
        return "{" + ", ".join(item_texts) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
