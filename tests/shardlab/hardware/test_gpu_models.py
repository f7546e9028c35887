"""gpu_models.yaml, the file that lists the peak performance of GPU models."""

import pytest

from shardlab.hardware import gpu_models


@pytest.mark.parametrize(
    ("gpu", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA L40S", "tf32", 183.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp32", 67.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA A10G", "bf16-autocast", 70.0),
        ("Tesla V100-SXM3-32GB-H", "fp16-autocast", 125.0),
        ("NVIDIA GH200 480GB", "bf16-pure", 989.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "tf32", 1250.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "fp32", 104.8),
        ("GeForce RTX 2080 Ti", "fp16", 53.8),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None),
        ("TITAN RTX", "fp16-autocast", 130.5),
        ("NVIDIA RTX A5000", "bf16", 111.1),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X", "fp16", 191.5),
        ("NVIDIA H200 and more", "bf16", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(gpu, precision, tera):
    """The peak FLOP/s of each GPU model equal the values of NVIDIA's data sheets without sparsity."""
    assert gpu_models.find_peak_flops(gpu, precision) == (None if tera is None else tera * 1e12)


# GPU names as NVML reports them, for the GPUs of CloudLab, of the studies and of common clouds.
NAMES = (
    "Tesla P100-PCIE-12GB", "Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB",
    "Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-DGXS-32GB", "Tesla V100-SXM3-32GB", "Tesla V100S-PCIE-32GB",
    "Tesla T4", "NVIDIA A10", "NVIDIA A10G", "NVIDIA A30", "NVIDIA A40", "NVIDIA RTX A6000", "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA L4", "NVIDIA L40S",
    "NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA H20", "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
    "NVIDIA GH200 144G HBM3e", "NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GB200", "NVIDIA GB300", "NVIDIA A800-SXM4-80GB",
    "NVIDIA A800 80GB PCIe", "NVIDIA RTX A5000", "NVIDIA TITAN RTX", "GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 3080",
    "NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "AMD Instinct MI250X",
    "AMD Instinct MI300X", "AMD Instinct MI325X",
)  # fmt: skip


def test_each_gpu_name_belongs_to_one_product():
    products = {
        name: [model.name for model in gpu_models.load_gpu_models() if gpu_models.is_of_model(model, name)] for name in NAMES
    }
    assert {name: models for name, models in products.items() if len(models) != 1} == {}


def test_each_product_is_plausible_and_says_where_its_figures_are_from():
    for one in gpu_models.load_gpu_models():
        assert len(one.source) > 10
        assert one.fp16 is None or one.fp16 >= 1.9 * one.fp32
        assert one.tf32 is None or one.tf32 <= (one.bf16 or 0)
        assert 10 <= one.memory_gb < 300
        assert 250 < one.memory_gb_per_s < 10_000
        assert 30 < one.link_gb_per_s < 2_000
        assert any(gpu_models.is_of_model(one, name) for name in NAMES)
