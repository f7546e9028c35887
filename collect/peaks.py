"""What GPUs can do at most, as NVIDIA's data sheets state it: the denominator of MFU. A GPU that is not here has none.

TFLOP/s without sparsity, of the part that is named: products of matrices on tensor cores, accumulated in fp32, but for fp32
itself, which runs on CUDA cores. Where a data sheet prints figures with sparsity only, half of them. Boards that were set
to a lower power limit, or clock lower, reach less: their MFU is still a share of this.
"""

from __future__ import annotations

import re

import msgspec


class Peak(msgspec.Struct, frozen=True):
    """One product. name: a pattern for the whole name that NVML gives. TFLOP/s by precision; absent where it has none."""

    name: str
    fp32: float
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    source: str = ""


PEAKS = (
    Peak("Tesla P100-PCIE-.*", 9.3, source="Tesla P100 PCIe data sheet, 2016"),
    Peak("Tesla P100-SXM2-.*", 10.6, source="Tesla P100 data sheet, 2016"),
    Peak("Tesla V100-PCIE-.*", 14.0, fp16=112.0, source="V100 data sheet, 2020"),
    Peak("Tesla V100-SXM2-.*", 15.7, fp16=125.0, source="V100 data sheet, 2020"),
    Peak("Tesla V100S-PCIE-.*", 16.4, fp16=130.0, source="V100 data sheet, 2020"),
    Peak("Tesla T4", 8.1, fp16=65.0, source="T4 data sheet, 2019"),
    Peak("NVIDIA A30", 10.3, 82.0, 165.0, 165.0, source="A30 data sheet, 2022"),
    Peak("NVIDIA A40", 37.4, 74.8, 149.7, 149.7, source="A40 data sheet, 2021"),
    Peak("NVIDIA A100.*", 19.5, 156.0, 312.0, 312.0, source="A100 data sheet, 2022"),
    Peak("NVIDIA L40S", 91.6, 183.0, 362.0, 362.0, source="L40S data sheet, 2023"),
    Peak("NVIDIA H100 80GB HBM3", 67.0, 494.5, 989.5, 989.5, source="H100 data sheet, 2023, SXM, halved"),
    Peak("NVIDIA H100 PCIe", 51.0, 378.0, 756.5, 756.5, source="H100 data sheet, 2023, PCIe, halved"),
    Peak("NVIDIA H100 NVL", 60.0, 417.5, 835.5, 835.5, source="H100 data sheet, 2024, NVL, halved"),
    Peak("NVIDIA H200", 67.0, 494.5, 989.5, 989.5, source="H200 data sheet, 2024, SXM, halved"),
    Peak("NVIDIA H200 NVL", 60.0, 417.5, 835.5, 835.5, source="H200 data sheet, 2024, NVL, halved"),
    Peak("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71.0, 71.0, source="GA102 white paper, 2020"),
)


def peak_flops(gpu: str, precision: str) -> float | None:
    """FLOP/s that a GPU of this NVML name reaches at most in a cell's precision, or None where that is not known."""
    found = next((peak for peak in PEAKS if re.fullmatch(peak.name, gpu)), None)
    if found is None:
        return None
    tera = {"fp32": found.fp32, "tf32": found.tf32, "bf16": found.bf16, "bf16-pure": found.bf16, "fp16": found.fp16}[precision]
    return None if tera is None else tera * 1e12
