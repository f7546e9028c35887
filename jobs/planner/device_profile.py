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

STREAMED_SHARE = PredictedRange(0.70, 0.85, 0.92)  # share of the memory bandwidth that an optimizer's kernels reach; assumed
# Seconds that the host needs to start one operator on the GPU, including the Python code of the model. Measured on the virtual
# machine of an H100 (docs/gpus.md): 47 and 73 microseconds with gpt2-tiny; other hosts are assumed to be faster.
OPERATOR_LAUNCH_S = PredictedRange(5e-6, 20e-6, 80e-6)
# The share of the peak in 16 bits that matrix products with an unaligned dimension reach. Measured on an H100 (docs/gpus.md):
# 0.125 for the head of GPT-2 and GPT-2 Large, whose vocabulary is odd; for other GPUs assumed.
UNALIGNED_SHARE = PredictedRange(0.10, 0.125, 0.25)
OPERATORS_PER_BLOCK = 45  # operators of one block in forward and backward; assumed, and low, because kernels may be fused


class AchievedShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of achieved.yaml: the shares of its peak that a GPU achieves. The comments of that file explain the fields."""

    gpu: str
    precisions: tuple[str, ...]
    products: tuple[float, float, float]
    attention: tuple[float, float, float]
    convolutions: tuple[float, float, float]
    unknown: tuple[float, float, float]
    source: str


class AchievedRates(msgspec.Struct, frozen=True):
    """The FLOP/s that kernels of a GPU reach at a precision. The fields are those of AchievedShare, and:"""

    products: PredictedRange
    attention: PredictedRange
    convolutions: PredictedRange
    unknown: PredictedRange
    unaligned: PredictedRange | None
    """In products with an unaligned dimension; None: the precision has no such rule."""


@functools.cache
def read_achieved_shares() -> tuple[AchievedShare, ...]:
    """The entries of achieved.yaml (shares of the peak that GPUs achieve), in the order of the file."""
    yaml_bytes = resources.files("jobs.planner").joinpath("achieved.yaml").read_bytes()
    return msgspec.yaml.decode(yaml_bytes, type=tuple[AchievedShare, ...])


@functools.cache
def find_rates(gpu_model: GpuModel, precision: str) -> AchievedRates | None:
    """The FLOP/s that kernels of a GPU reach at a precision; None if the GPU does not support the precision."""
    peak_flops = gpu_models.find_model_peak_flops(gpu_model, precision)
    if peak_flops is None:
        return None
    model_name = format_gpu_name(gpu_model)
    share_entry = next(
        share_entry
        for share_entry in read_achieved_shares()
        if precision in share_entry.precisions and re.fullmatch(share_entry.gpu, model_name)
    )
    return AchievedRates(
        products=PredictedRange(*share_entry.products).times(peak_flops),
        attention=PredictedRange(*share_entry.attention).times(peak_flops),
        convolutions=PredictedRange(*share_entry.convolutions).times(peak_flops),
        unknown=PredictedRange(*share_entry.unknown).times(peak_flops),
        unaligned=UNALIGNED_SHARE.times(peak_flops) if computed_bytes(precision) == 2 else None,
    )


def format_gpu_name(gpu_model: GpuModel) -> str:
    """A readable name of the GPU model. It is made from the model's regular expression: its first alternative, without optional
    words and special characters."""
    return re.sub(r"[().*\\]", "", re.sub(r"\(\w+ \|\)", "", gpu_model.name).split("|")[0])
