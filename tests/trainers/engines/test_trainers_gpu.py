"""Features that need a GPU. Without a GPU, the features are refused with a reason; with a GPU, the tests execute them."""

import subprocess
import sys

import pytest

from collect.sampler.gpu import GpuSource
from shardlab.hardware import nvml
from shardlab.matrix.cell import Instruments
from shardlab.runs.record import Sample

pytest_plugins = ["support_trainers"]


def has_gpu():
    """Whether torch sees a GPU. Without a driver of NVIDIA, torch is not imported."""
    if not nvml.read_gpus()[1]:
        return False
    asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


HAS_GPU = has_gpu()


def needs_gpu(test):
    """Decorates a test that pytest collects only if torch sees a GPU."""
    return test if HAS_GPU else None


ON_A_GPU = {
    "FSDP1 that offloads": {"strategy": "fsdp1-full-shard", "options": {"offload": "cpu"}},
    "SyncBatchNorm": {"workload": "resnet50-tiny", "strategy": "ddp", "options": {"sync_batch_norm": True}},
    "DeepSpeed in fp16": {"strategy": "zero2", "precision": "fp16"},
    "ZeRO++ quantised": {"strategy": "zero3", "options": {"quantized_weights": True}},
    "the allocator's snapshot": {"strategy": "single", "instruments": Instruments(memory="snapshot")},
}


@pytest.mark.parametrize("what", ON_A_GPU)
def test_a_cell_that_needs_a_gpu_is_refused_without_a_gpu_before_training(bench, what):
    run_dir = bench.run_dir(**ON_A_GPU[what])
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "GPU" in errors, errors
    assert "Allowed" in errors, errors
    assert not run_dir.steps(0).records


@needs_gpu
@pytest.mark.parametrize("what", ON_A_GPU)
def test_a_cell_that_needs_a_gpu_completes_on_a_gpu(bench, what):
    run_dir = bench.run_dir(launcher="torchrun", prove="auto", steps=3, **ON_A_GPU[what])
    code, errors = bench.finish(run_dir, "trainers", "run")
    assert code == 0, errors
    assert run_dir.read_result().state == "completed"


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1-full-shard", "fsdp2"])
def test_every_precision_is_proven_on_a_gpu(bench, strategy, precision):
    run_dir = bench.run_dir(launcher="torchrun", strategy=strategy, precision=precision, prove="auto", steps=3)
    code, errors = bench.finish(run_dir, "trainers", "run")
    assert code == 0, errors
    assert run_dir.read_result().same_work.verdict == "proven"


def by_nvidia_smi(*fields):
    """Asks nvidia-smi, NVIDIA's own tool. Returns one dict for each GPU, which maps the name of each field to its value as
    text."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [dict(zip(fields, line.split(", "), strict=True)) for line in said.splitlines()]


@needs_gpu
def test_the_sampler_and_nvidia_smi_report_the_same_values():
    """The sampler and nvidia-smi report the same values in the units of a Sample. The values change between two readings, so
    the tolerance is wide, but narrow enough to show a wrong unit."""
    fields = ("uuid", "memory.used", "power.draw", "temperature.gpu", "clocks.sm")
    source, sample = GpuSource(), Sample(schema=1, t_s=0, wall_s=0, host="h", boot_id="b")
    before = by_nvidia_smi(*fields)
    source.fill(sample)
    after = by_nvidia_smi(*fields)
    assert source.failures == {}
    assert all(0 <= gpu.utilization_pct <= 100 for gpu in sample.gpus)
    assert [gpu.uuid for gpu in sample.gpus] == [gpu["uuid"] for gpu in before]
    for gpu, first, second in zip(sample.gpus, before, after, strict=True):
        for ours, field, unit, slack in (
            (gpu.memory_used_bytes, "memory.used", 2**20, 1024),
            (gpu.power_w, "power.draw", 1, 100),
            (gpu.temperature_c, "temperature.gpu", 1, 5),
            (gpu.sm_clock_mhz, "clocks.sm", 1, 2000),
        ):
            told = [float(one[field]) for one in (first, second)]
            assert min(told) - slack <= ours / unit <= max(told) + slack, field


@needs_gpu
def test_a_gpu_is_described_as_nvidia_smi_describes_it():
    fields = (
        "uuid",
        "name",
        "memory.total",
        "pci.bus_id",
        "power.limit",
        "clocks.max.sm",
        "pcie.link.width.max",
        "driver_version",
    )
    driver, gpus, why = nvml.read_gpus()
    assert (why, {driver}) == (None, {one["driver_version"] for one in by_nvidia_smi("driver_version", "uuid")})
    for gpu, told in zip(gpus, by_nvidia_smi(*fields), strict=True):
        assert (gpu.uuid, gpu.name) == (told["uuid"], told["name"])
        assert gpu.memory_bytes // 2**20 == int(told["memory.total"])
        assert gpu.pci.lower().lstrip("0:") == told["pci.bus_id"].lower().lstrip("0:")
        assert gpu.power_limit_w == pytest.approx(float(told["power.limit"]), abs=0.01)
        assert (gpu.sm_clock_max_mhz, gpu.pcie_width_max) == (int(told["clocks.max.sm"]), int(told["pcie.link.width.max"]))
        others = {other.uuid for other in gpus} - {gpu.uuid}
        assert set(gpu.paths or {}) == others
