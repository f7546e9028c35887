"""Replaces what a matrix names and a cluster does not have, beside numbers of GPUs: a GPU type, a launcher, a long time limit.

None of the three is part of the work of a cell, so the questions of the study stay. Each changes only if it does not fit:

- gpu_type: the only GPU type that the cluster file names; null (the default GPUs of the cluster) if it names none or several.
- launcher: the first launcher that the cluster can use, torchrun before the others, and never one for rehearsals.
- time_limit: the largest time limit that the partition of the cell allows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jobs.launcher import launchers
from jobs.planning.resolve import Capacity, why_unusable
from shardlab.matrix import cell_sizes
from shardlab.matrix.matrix import Matrix, Point

KEYS = ("gpu_type", "launcher", "time_limit")
FIRST = "torchrun"  # the launcher that is tried first: it starts ranks on every cluster


class ReplacedValue(msgspec.Struct, frozen=True):
    """A value that the cluster does not have. name: of the value in a resolved cell. new: the value of the key in the matrix
    file that replaces it. why: the reason, in a sentence without a full stop."""

    name: str
    new: Any
    why: str


def replaced(keys: dict[str, Any], machine: Capacity) -> dict[str, ReplacedValue]:
    """The values of a combination that must be replaced on these machines, by the key of the matrix file.

    keys: the keys of a combination that is valid on some machine.
    """
    found = {}
    gpu_type = keys.get("gpu_type")
    room = machine.of(gpu_type)
    if room is None:
        types = sorted(machine.types)
        new = types[0] if len(types) == 1 else None
        has = f"the cluster has only the GPU type{'s' * (len(types) > 1)} {', '.join(types)}" if types else ""
        found["gpu_type"] = ReplacedValue("gpu_type", new, has or "the cluster file names no GPU type")
        room = machine.of(new) or machine
    launcher = keys.get("launcher")  # without the key, it is the launcher FIRST
    if launcher is not None and (why := why_unusable(launcher, room)) is not None:
        usable = [name for name, one in launchers().items() if one.on_gpus and why_unusable(name, room) is None]
        if usable:
            new = FIRST if FIRST in usable else usable[0]
            found["launcher"] = ReplacedValue("launcher", new, why.partition(". ")[0].rstrip("."))
    limit = keys.get("time_limit")
    if limit is not None and room.longest_s is not None and cell_sizes.seconds(limit) > room.longest_s:
        longest = _clock(room.longest_s)
        found["time_limit"] = ReplacedValue("time_limit_s", longest, f"the partition allows {longest}")
    return found


def with_defaults(asked: Matrix, machine: Capacity) -> Matrix:
    """The matrix with other values under `defaults`, where that replaces a value in all cells alike.

    It is the smallest change of the file. A key is left to the single cells if cells that have it from `defaults` need
    different values, or if a condition (`when`) or an entry of `exclude` or `include` depends on the key. Returns `asked`
    itself if nothing under `defaults` changes.
    """
    entries = [*asked.file.exclude, *asked.file.include]
    named = {key for entry in entries for key in entry} | asked.varying
    conditions = " ".join(str(entry.get("when", "")) for entry in entries)
    each = [(point, replaced(point.keys, machine)) for point in asked.points]
    defaults = {}
    for key in (key for key in KEYS if key in asked.file.defaults and key not in named and key not in conditions):
        new = {values[key].new if key in values else point.keys[key] for point, values in each}
        if len(new) == 1 and new != {asked.file.defaults[key]}:
            defaults[key] = new.pop()
    if not defaults:
        return asked
    points = [Point(point.keys | defaults, point.origin) for point in asked.points]
    file = msgspec.structs.replace(asked.file, defaults=asked.file.defaults | defaults)
    return msgspec.structs.replace(asked, points=points, file=file)


def _clock(seconds: int) -> str:
    """A time as a matrix file gives it, [D-]HH:MM:SS."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
