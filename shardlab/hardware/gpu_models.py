"""Reads gpu_models.yaml: the peak performance of GPU models according to their data sheets."""

from __future__ import annotations

import functools
import re
from importlib import resources

import msgspec


class GpuModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU model."""

    name: str
    """A regular expression that matches the whole NVML name."""
    fp32: float
    """Peak performance in TFLOP/s without sparsity; None if the GPU does not support the precision."""
    tf32: float | None = None
    """As `fp32`."""
    bf16: float | None = None
    """As `fp32`."""
    fp16: float | None = None
    """As `fp32`."""
    memory_gb: float
    """Memory in 1e9 bytes."""
    memory_gb_per_s: float
    """Memory bandwidth in 1e9 bytes/s."""
    link: str
    """The interconnect between the GPUs of one machine."""
    link_gb_per_s: float
    """Bandwidth of this interconnect in 1e9 bytes/s, the sum of both directions."""
    power_w: float | None = None
    """The largest power of the board in watts; None if the data sheet does not print this number."""
    source: str
    """The data sheet."""

    @property
    def runs_cuda(self) -> bool:
        """Whether runs can use the GPU. GPUs without CUDA are only for planning."""
        return not self.name.startswith("AMD ")


@functools.cache
def load_gpu_models() -> tuple[GpuModel, ...]:
    """All GPU models of gpu_models.yaml, in the order of the file."""
    models_yaml = resources.files("shardlab.hardware").joinpath("gpu_models.yaml").read_bytes()
    return msgspec.yaml.decode(models_yaml, type=tuple[GpuModel, ...])


def find_gpu_model(gpu_name: str) -> GpuModel | None:
    """The GPU model with this NVML name, or None if the file does not list it."""
    return next((gpu_model for gpu_model in load_gpu_models() if is_of_model(gpu_model, gpu_name)), None)


def is_of_model(gpu_model: GpuModel, gpu_name: str) -> bool:
    """Whether a GPU with this NVML name is of this model."""
    return re.fullmatch(gpu_model.name, gpu_name) is not None


def find_peak_flops(gpu_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU with this NVML name in a cell's precision, or None if the peak is not known."""
    gpu_model = find_gpu_model(gpu_name)
    return None if gpu_model is None else find_model_peak_flops(gpu_model, precision)


def find_model_peak_flops(gpu_model: GpuModel, precision: str) -> float | None:
    """Peak FLOP/s of a GPU model in a cell's precision; None if the GPU does not support the precision."""
    peak_tflops = {"fp32": gpu_model.fp32, "tf32": gpu_model.tf32, "bf16": gpu_model.bf16, "fp16": gpu_model.fp16}[
        precision.partition("-")[0]
    ]
    return None if peak_tflops is None else peak_tflops * 1e12
