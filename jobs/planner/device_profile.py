"""The speed that a GPU achieves: its peak at a precision by the data sheet, times the share that a kind of model reaches."""

from __future__ import annotations

import functools
import re
from importlib import resources

import msgspec

from shardlab.hardware import gpu_models
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange
from trainers.model.precision import computed_bytes

STREAMED = PredictedRange(0.70, 0.85, 0.92)  # share of the memory bandwidth that an optimizer's kernels reach; assumed
# Seconds that the host needs to start one operator on the GPU, including the Python code of the model. Measured on the virtual
# machine of an H100 (docs/gpus.md): 47 and 73 microseconds with gpt2-tiny; other hosts are assumed to be faster.
LAUNCH_S = PredictedRange(5e-6, 20e-6, 80e-6)
# The share of the peak in 16 bits that matrix products with an unaligned dimension reach. Measured on an H100 (docs/gpus.md):
# 0.125 for the head of GPT-2 and GPT-2 Large, whose vocabulary is odd; for other GPUs assumed.
UNALIGNED = PredictedRange(0.10, 0.125, 0.25)
OPERATORS = 45  # operators of one block in forward and backward; assumed, and low, because kernels may be fused


class AchievedShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of achieved.yaml: the share of its peak that a GPU achieves. The comments of that file explain the fields."""

    kind: str
    precisions: tuple[str, ...]
    gpu: str
    share: tuple[float, float, float]
    source: str


@functools.cache
def achieved_shares() -> tuple[AchievedShare, ...]:
    """The entries of achieved.yaml (shares of the peak that GPUs achieve), in the order of the file."""
    content = resources.files("jobs.planner").joinpath("achieved.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=tuple[AchievedShare, ...])


@functools.cache
def flops_per_s(gpu: GpuModel, precision: str, kind: str) -> PredictedRange | None:
    """The FLOP/s that a GPU reaches in forward and backward passes; None if the GPU does not support the precision."""
    name = gpu_name(gpu)
    peak = gpu_models.model_peak_flops(gpu, precision)
    if peak is None:
        return None
    candidates = (entry for entry in achieved_shares() if entry.kind == kind and precision in entry.precisions)
    entry = next(entry for entry in candidates if re.fullmatch(entry.gpu, name))
    return PredictedRange(*(peak * share for share in entry.share))


@functools.cache
def unaligned_flops_per_s(gpu: GpuModel, precision: str) -> PredictedRange | None:
    """The FLOP/s that a GPU reaches in matrix products in 16 bits with an unaligned dimension; None for other precisions, which
    have no such rule, and if the GPU does not support the precision."""
    peak = gpu_models.model_peak_flops(gpu, precision) if computed_bytes(precision) == 2 else None
    return None if peak is None else UNALIGNED.times(peak)


def gpu_name(gpu: GpuModel) -> str:
    """A readable name of the GPU model. It is made from the model's regular expression: its first alternative, without optional
    words and special characters."""
    return re.sub(r"[().*\\]", "", re.sub(r"\(\w+ \|\)", "", gpu.name).split("|")[0])
