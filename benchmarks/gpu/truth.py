"""Checks that measurements on a GPU are correct. Each check runs in its own process and returns a finding."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_rank_cell import nvml_handle, small, train
from records import Finding

from benchmarks import sampler
from trainers import dtypes
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks

STRATEGIES = ("single", "ddp", "fsdp1-full-shard", "fsdp2", "tp")
FLASH = ("flash", "cudnn", "fmha", "sdpa")
# parts of the names of kernels (cuBLAS, CUTLASS) that multiply fp32 numbers on tensor cores
TF32 = ("tf32", "s1688", "tensorop_s")


def steps(strategy: str = "single", **keys: Any) -> tuple[float, list[float]]:
    """Train a small cell with one rank. Returns (seconds of all timed steps, step_ms of each timed step), as `train` does."""
    ranks = Ranks(Rank())
    found = train(small(strategy=strategy, **keys), ranks, weights_on=torch.device("cpu"))
    ranks.leave_group()
    return found


def no_step_waits_for_the_gpu(strategy: str) -> Finding:
    """No operator makes the host wait for the GPU. torch raises an error for such an operator from the first timed step on.

    torch detects operators that wait for a stream, and copies between host and GPU that block the host. It does not detect
    waits for an event or for the whole device. With one rank, collectives and FSDP1's rate limiter do not wait.
    """
    try:
        train(
            small(strategy=strategy, precision="bf16", steps=5, warmup_steps=2),
            Ranks(Rank()),
            weights_on=torch.device("cpu"),
            at_first=lambda: torch.cuda.set_sync_debug_mode("error"),
            at_last=lambda: torch.cuda.set_sync_debug_mode("default"),
        )
    except RuntimeError as error:
        return {"holds": False, "why": str(error).splitlines()[0]}
    return {"holds": True}


def steps_add_up_to_the_wall_clock() -> Finding:
    """The sum of step_ms equals the duration of the same steps by the clock of the host, within 1 %."""
    took_s, step_ms = steps(precision="bf16", steps=50, warmup_steps=10, options={"n_embd": 1024}, seq_len=256)
    share = sum(step_ms) / 1000 / took_s
    return {"holds": abs(share - 1) < 0.01, "sum_ms": sum(step_ms), "wall_ms": 1000 * took_s, "share": share}


def kernels_are_those_of_the_precision() -> Finding:
    """In bf16, attention runs a fused kernel; in fp32, no kernel uses tensor cores."""
    from torch.profiler import ProfilerActivity, profile

    def names(which: str) -> list[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            steps(precision=which, steps=3, options={"n_embd": 256}, seq_len=128)
        return sorted({event.key for event in seen.key_averages()})

    low, full = names("bf16"), names("fp32")
    fused = [name for name in low if any(word in name.lower() for word in FLASH)]
    tensor_cores = [name for name in full if any(word in name.lower() for word in TF32)]
    return {"holds": bool(fused) and not tensor_cores, "attention in bf16": fused[:5], "tensor cores in fp32": tensor_cores[:5]}


def tf32_rounds_and_fp32_does_not() -> Finding:
    """The largest error of a matrix product, compared with fp64, is as expected.

    The expected error is about 2**-11 for tf32 and 2**-24 for fp32, each multiplied by sqrt(1024).
    """
    torch.manual_seed(1)
    one, other = (torch.randn(1024, 1024, device="cuda", dtype=torch.float64) for _ in range(2))
    exact = one @ other
    errors = {}
    for which in ("fp32", "tf32"):
        dtypes.set_tf32(which, torch.device("cuda"))
        found = (one.float() @ other.float()).double()
        errors[which] = float((found - exact).abs().max() / exact.abs().max())
    has_tf32 = torch.cuda.get_device_capability() >= (8, 0)
    holds = errors["fp32"] < 3e-6 and (3e-5 < errors["tf32"] < 3e-3) == has_tf32
    return {"holds": holds, "has_tf32": has_tf32, **errors}


def the_allocator_counts_no_more_than_the_driver() -> Finding:
    """Bytes allocated <= bytes reserved by torch <= bytes used on the GPU according to NVML."""
    import pynvml

    handle = nvml_handle()
    held = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(4)]
    used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    holds = len(held) * 2**28 <= allocated <= reserved <= used
    return {"holds": holds, "allocated": allocated, "reserved": reserved, "used": used}


def _if_nvml_answers(check: Callable[[], Finding]) -> Callable[[], Finding]:
    """A check that calls `check`. If NVML reports an error, as on virtual GPUs, sandboxes and MIG, the check is dropped."""

    def checked() -> Finding:
        import pynvml

        try:
            return check()
        except pynvml.NVMLError as error:
            return {"dropped": f"NVML: {error}"}

    return checked


def energy_is_power_over_time(seconds: float = 8.0) -> Finding:
    """NVML's energy counter equals the integral of NVML's power samples within 15 % (10 samples per second, GPU under load)."""
    import pynvml

    handle = nvml_handle()
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    powers: list[float] = []
    for _ in range(20):
        one @ one
    torch.cuda.synchronize()
    before, began = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.monotonic()
    while time.monotonic() - began < seconds:
        ends = time.monotonic() + 0.1
        while time.monotonic() < ends:
            one @ one
            torch.cuda.synchronize()
        powers.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    took_s = time.monotonic() - began
    counted_j = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1000
    integrated_j = sum(powers) / len(powers) * took_s
    return {"holds": abs(counted_j / integrated_j - 1) < 0.15, "counted_j": counted_j, "integrated_j": integrated_j}


def the_sampler_keeps_its_rate(seconds: float = 6.0) -> Finding:
    """The telemetry sampler takes at least 95 % of the samples of its rate at 10 Hz, with at most 10 % of a core.

    benchmarks/sampler.py measures this with a stub that answers at once. Here, the driver answers.
    """
    import pynvml

    pynvml.nvmlInit()
    root = Path(__file__).resolve().parents[2]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory() as folder:
        found = {hz: sampler.cost_pct(Path(folder) / f"{hz}.jsonl", hz, seconds, variables) for hz in (1, 10)}
    (slow_pct, _), (fast_pct, rate) = found.values()
    holds = fast_pct <= 10 and rate >= 9.5
    return {"holds": holds, "core_pct_at_1_hz": slow_pct, "core_pct_at_10_hz": fast_pct, "samples_per_s_at_10_hz": rate}


CHECKS: dict[str, Callable[[], Finding]] = {
    **{f"no step waits for the GPU: {name}": (lambda name=name: no_step_waits_for_the_gpu(name)) for name in STRATEGIES},
    "steps add up to the wall clock": steps_add_up_to_the_wall_clock,
    "kernels are those of the precision": kernels_are_those_of_the_precision,
    "tf32 rounds, fp32 does not": tf32_rounds_and_fp32_does_not,
    "the allocator counts no more than the driver": _if_nvml_answers(the_allocator_counts_no_more_than_the_driver),
    "energy is power over time": _if_nvml_answers(energy_is_power_over_time),
    "the sampler keeps its rate": _if_nvml_answers(the_sampler_keeps_its_rate),
}
