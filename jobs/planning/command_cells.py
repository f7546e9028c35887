"""Resolves the points of a matrix whose workload is a command of the user into cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jobs.launcher import Launcher
from jobs.planning import cell_limits
from jobs.planning.cell_limits import AddProblem
from shardlab.errors import InputError, UnknownName
from shardlab.matrix import command
from shardlab.matrix.cell import AnyCell, Draft, Instruments
from shardlab.matrix.matrix import Matrix, Point

# Keys with a meaning for every run. All other keys say something only if the command line contains their value.
KEYS_OF_EVERY_RUN = frozenset(
    ("workload", "strategy", "gpus", "nnodes", "gpu_type", "environment", "launcher", "warmup_steps", "time_limit",
     "hang_limit", "expect", "instruments", "env", "set")
)  # fmt: skip
# Keys of a draft that a cell has under the same name, so that a command line may contain their values.
_PLACEHOLDER_KEYS = (
    "global_batch_size", "micro_batch_size", "seq_len", "steps", "epochs", "precision", "seed", "tp", "pp", "dp", "compile",
    "activation_checkpointing", "max_grad_norm",
)  # fmt: skip


def resolve_command_point(
    matrix: Matrix,
    point: Point,
    launcher_by_name: Mapping[str, Launcher],
    folder_digest: str,
    gpus_per_node: int | None,
    add_problem: AddProblem,
) -> AnyCell | None:
    """Resolve one point whose workload is a command into a cell. If the cell is not possible, adds problems and returns None.

    launcher_by_name: all launchers. folder_digest: that of the folder of the command. gpus_per_node: None if it is not known.
    """
    command_name = str(point.keys["workload"])
    try:
        draft = Point({"strategy": command.DEFAULT_LABEL, **point.keys}, point.origin).make_draft()
    except msgspec.ValidationError as fault_error:
        add_problem("workload", f"a cell is not complete: {str(fault_error)[0].lower()}{str(fault_error)[1:]}.")
        return None
    faults = _find_faults(matrix, point, draft, launcher_by_name)
    for key, sentence in faults.items():
        add_problem(key, sentence)
    limits_s = cell_limits.parse_limits(draft, add_problem)
    if faults or not limits_s[1]:
        return None
    launcher = launcher_by_name[draft.launcher]
    nnodes = draft.nnodes or cell_limits.count_fewest_nodes(draft, launcher, gpus_per_node)
    given_values = {key: getattr(draft, key) for key in _PLACEHOLDER_KEYS if key in point.keys}
    set_values = {f"set.{set_name}": value for set_name, value in draft.set.items()}
    value_by_placeholder = {"strategy": draft.strategy, "gpus": draft.gpus, "nnodes": nnodes, **given_values, **set_values}
    try:
        filled_command = command.fill_command(matrix.command_by_name[command_name], value_by_placeholder)
    except InputError as fault_error:
        add_problem("workload", str(fault_error))
        return None
    cell = AnyCell(
        workload=command_name, strategy=draft.strategy, gpus=draft.gpus, nnodes=nnodes, launcher=draft.launcher, prove="off",
        warmup_steps=draft.warmup_steps, instruments=draft.instruments, time_limit_s=limits_s[0], hang_limit_s=limits_s[1],
        expect=draft.expect, gpu_type=draft.gpu_type, environment=draft.environment, command=filled_command, set=draft.set,
        workload_code=folder_digest, env=command.format_variables(draft.env), **given_values,
    )  # fmt: skip
    if (refusal := cell_limits.explain_uneven_ranks(cell, launcher)) is not None:
        add_problem("nnodes", refusal)
        return None
    return cell


def _find_faults(matrix: Matrix, point: Point, draft: Draft, launcher_by_name: Mapping[str, Launcher]) -> dict[str, str]:
    """Why a point cannot be a cell of a command: for each key at fault, a sentence."""
    placeholders = command.find_placeholders(matrix.command_by_name[str(point.keys["workload"])])
    faults: dict[str, str] = {}
    if draft.launcher not in launcher_by_name:
        faults["launcher"] = str(UnknownName("launcher", draft.launcher, launcher_by_name))
    elif not launcher_by_name[draft.launcher].starts_commands:
        allowed_names = ", ".join(name for name, launcher in launcher_by_name.items() if launcher.starts_commands)
        faults["launcher"] = f"{draft.launcher} starts no command. Allowed: {allowed_names}."
    elif (
        matrix.command_by_name[str(point.keys["workload"])].launcher_options
        and not launcher_by_name[draft.launcher].takes_options
    ):
        allowed_names = ", ".join(name for name, launcher in launcher_by_name.items() if launcher.takes_options)
        faults["launcher"] = f"{draft.launcher} takes no launcher_options. Allowed: {allowed_names}."
    if "strategy" in point.keys and draft.strategy not in matrix.strategy_labels:
        faults["strategy"] = (
            f"shardlab does not know the strategy of a command. Allowed: a label, written {{label: {draft.strategy}}}."
        )
    for key in point.keys:
        if key in _PLACEHOLDER_KEYS and key not in placeholders:
            faults[key] = f"the command has no placeholder {{{key}}}, so this value would change nothing."
        elif key not in _PLACEHOLDER_KEYS and key.partition(".")[0] not in KEYS_OF_EVERY_RUN:
            faults[key] = "is a key of trainings by shardlab. Allowed for a command: set.NAME, for a value of its own."
    for set_name in draft.set:
        if (fault := command.explain_wrong_setting(set_name)) is not None:
            faults[f"set.{set_name}"] = fault
        elif f"set.{set_name}" not in placeholders:
            faults[f"set.{set_name}"] = (
                f"the command has no placeholder {{set.{set_name}}}, so this value would change nothing."
            )
    faults |= find_variable_faults(draft)
    if msgspec.structs.replace(draft.instruments, telemetry_hz=1.0) != Instruments(telemetry_hz=1.0):
        faults["instruments"] = "only shardlab's own trainings have instruments. Allowed: instruments.telemetry_hz."
    return faults


def find_variable_faults(draft: Draft) -> dict[str, str]:
    """Why a cell cannot set environment variables of `env`: for each key at fault, a sentence."""
    faults = {f"env.{variable_name}": command.explain_wrong_variable(variable_name) for variable_name in draft.env}
    return {key: fault for key, fault in faults.items() if fault is not None}


def describe_commands(matrix: Matrix, cells: Sequence[AnyCell]) -> list[str]:
    """What a user should know about the commands of a matrix before they run, as sentences. cells: of the matrix."""
    return _describe_samples(matrix) + _describe_equal_commands(cells)


def _describe_equal_commands(cells: Sequence[AnyCell]) -> list[str]:
    """For each group of cells that differ in their label only, so that they run the same command: a sentence."""
    labels_by_run: dict[bytes, list[str]] = {}
    for cell in cells:
        if cell.command is not None:
            labels_by_run.setdefault(msgspec.json.encode(msgspec.structs.replace(cell, strategy="")), []).append(cell.strategy)
    return [
        f"the labels {', '.join(labels)} are of one command with the same values, so their cells do the same; the "
        f"placeholder {{strategy}} passes the label to the command"
        for labels in dict.fromkeys(tuple(labels) for labels in labels_by_run.values() if len(labels) > 1)
    ]


def _describe_samples(matrix: Matrix) -> list[str]:
    """For each command whose steps have a sample line: what is read from this line, as a sentence."""
    sentences = []
    for command_name, workload in matrix.command_by_name.items():
        if workload.steps is not None and workload.steps.sample is not None:
            step_values: Mapping[str, Any] = command.read_step(workload.steps, workload.steps.sample) or {}
            values_text = ", ".join(f"{value_name} {number:g}" for value_name, number in step_values.items())
            sentences.append(f"{command_name}: the sample line tells {values_text}.")
    return sentences
