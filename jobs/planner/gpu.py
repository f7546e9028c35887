"""Finds the GPU model that a cluster file, an inventory or --gpu means, and the memory that it offers to a process."""

from __future__ import annotations

import re

from jobs.planner import device_profile
from jobs.planner.memory import terms
from shardlab.errors import UnknownName
from shardlab.hardware import gpu_models
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange, exactly

GIB = 1 << 30


def find(name: str, memory_gib: float | None = None) -> GpuModel | None:
    """The GPU model with this name, which is its name in NVML, or a short name as in Slurm (a100, h100-pcie, v100-sxm2-16gb).

    memory_gib: the memory, which decides between models with the same name. The first entry of gpu_models.yaml that has all
    words of the name is used. Returns None if no entry has all these words.
    """
    if (exact := gpu_models.model(name)) is not None:
        return exact
    words = set(_words(name)) - {"nvidia", "tesla", "geforce"}
    fitting = [entry for entry in gpu_models.all_models() if words and words <= set(_words(entry.name))]
    if memory_gib is not None:
        fitting.sort(key=lambda entry: abs(entry.memory_gb - memory_gib))
    return fitting[0] if fitting else None


def must_find(name: str) -> GpuModel:
    """The GPU model with this name, as `find` returns it. If there is no such model, raises UnknownName, which lists all known
    names."""
    if (found := find(name)) is None:
        raise UnknownName("GPU", name, known(), where="--gpu")
    return found


def known() -> list[str]:
    """A short name of every GPU model that gpu_models.yaml lists."""
    return sorted(
        {
            "-".join(word for word in _words(device_profile.gpu_name(entry)) if word not in ("nvidia", "tesla"))
            for entry in gpu_models.all_models()
        }
    )


def capacity(gpu: GpuModel | None, memory_gib: float | None) -> PredictedRange | None:
    """The memory of a GPU in bytes; None if it is not known. memory_gib: the memory that the cluster file states, in GiB."""
    if memory_gib is not None:
        return exactly(memory_gib * GIB)
    return None if gpu is None else terms()["usable"].range(gpu.memory_gb * GIB)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
