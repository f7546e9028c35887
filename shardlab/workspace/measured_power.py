"""Reads and writes WORKSPACE/.shardlab/power/MATRIX.json: the power that the GPUs of runs drew while their steps were timed.

`collect summarize` writes this file from telemetry, which `jobs` does not read; the planner corrects predicted energy with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from shardlab.files import files, json_file
from shardlab.workspace.workspace import Workspace

SCHEMA = 1


class MeasuredPowers(msgspec.Struct, frozen=True):
    """The content of the file for the runs of one matrix."""

    schema: int
    watts_per_gpu: dict[str, Annotated[float, msgspec.Meta(gt=0)]]
    """Maps the id of a run to the mean power of one of its GPUs in watts."""


def write_powers(workspace: Workspace, matrix_name: str, watts_by_run: Mapping[str, float]) -> None:
    """Write the file of a matrix, unless no power was measured or the file already has this content. Raises WorkspaceError."""
    if not watts_by_run:
        return
    power_folder = _find_power_folder(workspace)
    powers_json = msgspec.json.format(msgspec.json.encode(MeasuredPowers(SCHEMA, dict(watts_by_run))), indent=2) + b"\n"
    power_path = power_folder / f"{matrix_name}.json"
    with files.as_workspace_error("write"):
        if power_path.exists() and files.read(power_path) == powers_json:
            return
    files.make_folder(power_folder)
    files.write_atomic(power_path, powers_json)


def read_all_powers(workspace: Workspace) -> dict[str, float]:
    """The watts per GPU of the runs of all matrices, by run id. Files that are damaged or cannot be read are left out."""
    watts_by_run: dict[str, float] = {}
    for path in sorted(_find_power_folder(workspace).glob("*.json")):
        if (measured_powers := json_file.read_json_if_valid(path, MeasuredPowers)) is not None:
            watts_by_run |= measured_powers.watts_per_gpu
    return watts_by_run


def _find_power_folder(workspace: Workspace) -> Path:
    return workspace.shardlab_folder / "power"
