"""Replaces what a matrix names and a cluster does not have, beside numbers of GPUs: a GPU type, an environment, a launcher,
a long time limit.

None of them is part of the work of a cell, so the questions of the study stay. Each changes only if it does not fit:

- gpu_type: the only GPU type that the cluster file names; null (the default GPUs of the cluster) if it names none or several.
- environment: null, the default environment of the cluster.
- launcher: the first launcher that the cluster can use, torchrun before the others, and never one for rehearsals.
- time_limit: the largest time limit that the partition of the cell allows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jobs.launcher import launchers
from jobs.planning.resolve import Capacity, explain_unusable_launcher
from shardlab.matrix import cell_sizes
from shardlab.matrix.matrix import Matrix, Point

REPLACED_KEYS = ("gpu_type", "environment", "launcher", "time_limit")
PREFERRED_LAUNCHER = "torchrun"  # the launcher that is tried first: it starts ranks on every cluster


class ReplacedValue(msgspec.Struct, frozen=True):
    """A value that the cluster does not have."""

    name: str
    """Of the value in a resolved cell."""
    new_value: Any
    """The value of the key in the matrix file that replaces it."""
    why: str
    """The reason, in a sentence without a full stop."""


def find_replaced_values(point_keys: dict[str, Any], machine: Capacity) -> dict[str, ReplacedValue]:
    """The values of a combination that must be replaced on these machines, by the key of the matrix file.

    point_keys: the keys of a combination that is valid on some machine.
    """
    replaced_values = {}
    gpu_type = point_keys.get("gpu_type")
    capacity = machine.for_gpu_type(gpu_type)
    if capacity is None:
        gpu_types = sorted(machine.types)
        replacement = gpu_types[0] if len(gpu_types) == 1 else None
        why_replaced = (
            f"the cluster has only the GPU type{'s' * (len(gpu_types) > 1)} {', '.join(gpu_types)}" if gpu_types else ""
        )
        replaced_values["gpu_type"] = ReplacedValue(
            "gpu_type", replacement, why_replaced or "the cluster file names no GPU type"
        )
        capacity = machine.for_gpu_type(replacement) or machine
    if (environment := point_keys.get("environment")) not in (None, *machine.environments):
        why_unknown = f"the cluster file has no environment {environment}"
        replaced_values["environment"] = ReplacedValue("environment", None, why_unknown)
    launcher = point_keys.get("launcher")  # without the key, it is the launcher PREFERRED_LAUNCHER
    if launcher is not None and (why := explain_unusable_launcher(launcher, capacity)) is not None:
        usable_launchers = [
            name for name, entry in launchers().items() if entry.on_gpus and explain_unusable_launcher(name, capacity) is None
        ]
        if usable_launchers:
            replacement = PREFERRED_LAUNCHER if PREFERRED_LAUNCHER in usable_launchers else usable_launchers[0]
            replaced_values["launcher"] = ReplacedValue("launcher", replacement, why.partition(". ")[0].rstrip("."))
    time_limit = point_keys.get("time_limit")
    if time_limit is not None and capacity.longest_s is not None and cell_sizes.parse_seconds(time_limit) > capacity.longest_s:
        longest_clock = cell_sizes.format_seconds(capacity.longest_s)
        replaced_values["time_limit"] = ReplacedValue("time_limit_s", longest_clock, f"the partition allows {longest_clock}")
    return replaced_values


def replace_defaults(matrix: Matrix, machine: Capacity) -> Matrix:
    """The matrix with other values under `defaults`, where that replaces a value in all cells alike.

    It is the smallest change of the file. A key is left to the single cells if cells that have it from `defaults` need
    different values, or if a condition (`when`) or an entry of `exclude` or `include` depends on the key. Returns `matrix`
    itself if nothing under `defaults` changes.
    """
    file_entries = [*matrix.file.exclude, *matrix.file.include]
    explicit_keys = {key for entry in file_entries for key in entry} | matrix.varying_keys
    conditions_text = " ".join(str(entry.get("when", "")) for entry in file_entries)
    replaced_by_point = [(point, find_replaced_values(point.keys, machine)) for point in matrix.points]
    new_defaults = {}
    for key in (
        key for key in REPLACED_KEYS if key in matrix.file.defaults and key not in explicit_keys and key not in conditions_text
    ):
        new_values = {
            replaced_values[key].new_value if key in replaced_values else point.keys[key]
            for point, replaced_values in replaced_by_point
        }
        if len(new_values) == 1 and new_values != {matrix.file.defaults[key]}:
            new_defaults[key] = new_values.pop()
    if not new_defaults:
        return matrix
    new_points = [Point(point.keys | new_defaults, point.origin) for point in matrix.points]
    new_file = msgspec.structs.replace(matrix.file, defaults=matrix.file.defaults | new_defaults)
    return msgspec.structs.replace(matrix, points=new_points, file=new_file)
