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
    values_of_cells = [_flatten_cell(cell) for cell in cells]
    default_values_of_cells = [_collect_default_values(cell) for cell in cells]
    compared_keys = dict.fromkeys(key for value_by_key in values_of_cells for key in value_by_key if key not in COLUMN_KEYS)
    differing_keys = [
        key
        for key in compared_keys
        if len({_format_value(value_by_key[key]) for value_by_key in values_of_cells if key in value_by_key}) > 1
        and any(
            key in value_by_key and value_by_key[key] != default_by_key.get(key, ...)
            for value_by_key, default_by_key in zip(values_of_cells, default_values_of_cells, strict=True)
        )
    ]
    return [
        ", ".join(
            f"{FILE_KEYS_OF_SECONDS.get(key, key)}={_format_value(value_by_key[key])}"
            for key in differing_keys
            if key in value_by_key
        )
        for value_by_key in values_of_cells
    ]


def _flatten_cell(cell: AnyCell) -> dict[str, Any]:
    cell_as_builtins = msgspec.to_builtins(cell)
    limits_s = {key: cell_as_builtins[key] for key in FILE_KEYS_OF_SECONDS}
    clock_texts = {key: None if limit_s is None else cell_sizes.format_seconds(limit_s) for key, limit_s in limits_s.items()}
    instrument_values = {f"instruments.{name}": value for name, value in cell_as_builtins["instruments"].items()}
    return map_cell_values(cell_as_builtins) | clock_texts | instrument_values


def _collect_default_values(cell: AnyCell) -> dict[str, Any]:
    """The default values that the strategy and the workload of a cell give to keys that a matrix does not set."""
    if not isinstance(cell, Cell):
        return {}
    workload = menu.find_workload_of_cell(cell)
    all_options = (*menu.find_strategy_of_cell(cell).options, *workload.options)
    option_default_by_key = {f"options.{option.name}": option.default for option in all_options}
    optimizer_default_by_key = {f"optimizer.{name}": value for name, value in msgspec.to_builtins(workload.optimizer).items()}
    return {"seq_len": workload.seq_len, **optimizer_default_by_key, **option_default_by_key}


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
