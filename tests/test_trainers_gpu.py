"""What cannot run on a CPU: refused there with its reason, and run here where there is a GPU."""

import subprocess
import sys

import pytest

from shardlab.cell import Instruments

pytest_plugins = ["support_trainers"]


def has_gpu():
    asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


GPU = pytest.mark.skipif(not has_gpu(), reason="needs a GPU, and torch sees none")
ON_A_GPU = {
    "FSDP1 that offloads": {"strategy": "fsdp1-full-shard", "options": {"offload": "cpu"}},
    "SyncBatchNorm": {"workload": "resnet50-tiny", "strategy": "ddp", "options": {"sync_batch_norm": True}},
    "DeepSpeed in fp16": {"strategy": "zero2", "precision": "fp16"},
    "ZeRO++ quantised": {"strategy": "zero3", "options": {"quantized_weights": True}},
    "the allocator's snapshot": {"strategy": "single", "instruments": Instruments(memory="snapshot")},
}


@pytest.mark.parametrize("what", ON_A_GPU)
def test_without_a_gpu_it_is_refused_before_anything_is_trained(bench, what):
    run_dir = bench.run_dir(**ON_A_GPU[what])
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert "GPU" in errors, errors
    assert "Allowed" in errors, errors
    assert not run_dir.steps(0).records


@GPU
@pytest.mark.parametrize("what", ON_A_GPU)
def test_with_a_gpu_it_runs_and_comes_to_its_end(bench, what):
    run_dir = bench.run_dir(launcher="torchrun", prove="auto", steps=3, **ON_A_GPU[what])
    code, errors = bench.finish(run_dir, "trainers", "run")
    assert code == 0, errors
    assert run_dir.read_result().state == "completed"


@GPU
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1-full-shard", "fsdp2"])
def test_every_precision_is_proven_on_a_gpu(bench, strategy, precision):
    run_dir = bench.run_dir(launcher="torchrun", strategy=strategy, precision=precision, prove="auto", steps=3)
    code, errors = bench.finish(run_dir, "trainers", "run")
    assert code == 0, errors
    assert run_dir.read_result().same_work.verdict == "proven"
