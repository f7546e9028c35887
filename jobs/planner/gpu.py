"""Finds the GPU model that a cluster file, an inventory or --gpu means, and the memory that it offers to a process."""

from __future__ import annotations

import re

from jobs.planner import device_profile
from jobs.planner.memory import memory_terms
from shardlab.errors import UnknownName
from shardlab.hardware import gpu_models
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange, exact_range

GIB = 1 << 30


def find_model(name: str, memory_gib: float | None = None) -> GpuModel | None:
    """The GPU model with this name, which is its name in NVML, or a short name as in Slurm (a100, h100-pcie, v100-sxm2-16gb).

    memory_gib: the memory, which decides between models with the same name. The first entry of gpu_models.yaml that has all
    words of the name is used. Returns None if no entry has all these words.
    """
    if (exact_model := gpu_models.find_model(name)) is not None:
        return exact_model
    words = set(_split_words(name)) - {"nvidia", "tesla", "geforce"}
    fitting_models = [entry for entry in gpu_models.all_models() if words and words <= set(_split_words(entry.name))]
    if memory_gib is not None:
        fitting_models.sort(key=lambda entry: abs(entry.memory_gb - memory_gib))
    return fitting_models[0] if fitting_models else None


def must_find_model(name: str) -> GpuModel:
    """The GPU model with this name, as `find_model` returns it. If there is no such model, raises UnknownName, which lists all
    known names."""
    if (model := find_model(name)) is None:
        raise UnknownName("GPU", name, list_model_names(), where="--gpu")
    return model


def list_model_names() -> list[str]:
    """A short name of every GPU model that gpu_models.yaml lists."""
    return sorted(
        {
            "-".join(word for word in _split_words(device_profile.gpu_name(entry)) if word not in ("nvidia", "tesla"))
            for entry in gpu_models.all_models()
        }
    )


def capacity(gpu: GpuModel | None, memory_gib: float | None) -> PredictedRange | None:
    """The memory of a GPU in bytes; None if it is not known. memory_gib: the memory that the cluster file states, in GiB."""
    if memory_gib is not None:
        return exact_range(memory_gib * GIB)
    return None if gpu is None else memory_terms()["usable"].range(gpu.memory_gb * GIB)


def _split_words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
