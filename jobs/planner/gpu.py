"""Finds the GPU model that a cluster file, an inventory or --gpu means, and the memory that it offers to a process."""

from __future__ import annotations

import re

from jobs.planner import device_profile
from jobs.planner.memory import read_memory_terms
from shardlab.errors import UnknownName
from shardlab.hardware import gpu_models
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange, make_exact_range

GIB = 1 << 30
MAKER_WORDS = {"nvidia", "tesla", "geforce", "amd", "instinct"}  # words of a GPU's name that a short name leaves out


def find_gpu_model(gpu_name: str, memory_gib: float | None = None) -> GpuModel | None:
    """The GPU model with this name, which is its name in NVML, or a short name as in Slurm (a100, h100-pcie, v100-sxm2-16gb).

    memory_gib: the memory, which decides between models with the same name. The first entry of gpu_models.yaml that has all
    words of the name is used. Returns None if no entry has all these words.
    """
    if (exact_model := gpu_models.find_gpu_model(gpu_name)) is not None:
        return exact_model
    fitting_models = _list_fitting_models(gpu_name, memory_gib)
    return fitting_models[0] if fitting_models else None


def _list_fitting_models(gpu_name: str, memory_gib: float | None) -> list[GpuModel]:
    """The GPU models that have all words of a name; with `memory_gib`, only those whose memory is closest to it."""
    name_words = set(_split_words(gpu_name)) - MAKER_WORDS
    fitting_models = [
        listed_model
        for listed_model in gpu_models.load_gpu_models()
        if name_words and name_words <= set(_split_words(listed_model.name))
    ]
    if memory_gib is None or not fitting_models:
        return fitting_models
    memory_distances = [abs(listed_model.memory_gb - memory_gib) for listed_model in fitting_models]
    return [
        listed_model
        for listed_model, distance in zip(fitting_models, memory_distances, strict=True)
        if distance == min(memory_distances)
    ]


def explain_gpu_name(gpu_name: str, memory_gib: float | None = None) -> str | None:
    """A remark on the name of a GPU in a cluster file that means no GPU model, or several ones; None if it means one."""
    if gpu_models.find_gpu_model(gpu_name) is not None:
        return None
    fitting_models = _list_fitting_models(gpu_name, memory_gib)
    if not fitting_models:
        return f"{UnknownName('GPU', gpu_name, list_gpu_names(), place='gpus.type')} The planner predicts no time."
    first_name, *other_names = (_make_short_name(fitting_model) for fitting_model in fitting_models)
    if not other_names or first_name == gpu_name.lower():
        return None
    return (
        f"gpus.type: {gpu_name} is planned as {first_name}; memory_gib, or a longer name for gpus.type, selects "
        f"another model: {', '.join(other_names)}."
    )


def must_find_gpu_model(gpu_name: str) -> GpuModel:
    """The GPU model with this name, as `find_gpu_model` returns it. If there is no such model, raises UnknownName, which lists
    all known names."""
    if (gpu_model := find_gpu_model(gpu_name)) is None:
        raise UnknownName("GPU", gpu_name, list_gpu_names(), place="--gpu")
    return gpu_model


def list_gpu_names() -> list[str]:
    """A short name of every GPU model that gpu_models.yaml lists."""
    return sorted({_make_short_name(listed_model) for listed_model in gpu_models.load_gpu_models()})


def _make_short_name(gpu_model: GpuModel) -> str:
    return "-".join(word for word in _split_words(device_profile.format_gpu_name(gpu_model)) if word not in MAKER_WORDS)


def find_gpu_memory(gpu_model: GpuModel | None, memory_gib: float | None) -> PredictedRange | None:
    """The memory of a GPU in bytes; None if it is not known. memory_gib: the memory that the cluster file states, in GiB."""
    if memory_gib is not None:
        return make_exact_range(memory_gib * GIB)
    return None if gpu_model is None else read_memory_terms()["usable"].scale(gpu_model.memory_gb * GIB)


def _split_words(gpu_name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", gpu_name.lower())
