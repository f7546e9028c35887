"""Checks that NVML and torch see the same number of GPUs. Telemetry uses NVML and ranks use torch: if the numbers differ,
telemetry shows GPUs that the ranks do not use."""

from __future__ import annotations

from provision.check import Check, Outcome
from provision.checks import trial
from provision.facts.host import HOST
from provision.facts.torch import Torch
from provision.operation import Site, Target
from shardlab.hardware.host import Host


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if NVML and torch see the same number of GPUs on this node."""
    return judge_gpus(target.facts[HOST], trial.run_trial(target).torch)


def judge_gpus(host: Host, torch: Torch) -> Outcome:
    """Returns a passed Outcome if NVML and torch see the same number of GPUs; does not apply if neither of them sees a GPU."""
    if torch.version is None:
        return Outcome(None, "needs torch")
    if not host.gpus:
        absent_reason = host.gpu_why_absent or "NVML finds none"
        if torch.gpus:
            sentence = f"torch sees {torch.gpus} GPUs, NVML none ({absent_reason})"
            return Outcome(False, sentence, "install the driver's NVML (libnvidia-ml): telemetry needs it")
        return Outcome(None, f"no GPU here ({absent_reason}): ranks run on the CPU")
    gpu_count = len(host.gpus)
    if torch.gpus == gpu_count:
        return Outcome(True, f"NVML and torch both see {gpu_count} x {host.gpus[0].name}", measured={"gpus": gpu_count})
    torch_count_text = "none" if torch.gpus is None else str(torch.gpus)
    absent_reason = f" ({torch.why_no_gpus})" if torch.why_no_gpus else ""
    return Outcome(False, f"NVML sees {gpu_count} GPUs, torch {torch_count_text}{absent_reason}", _advise_repair(host, torch))


def _advise_repair(host: Host, torch: Torch) -> str:
    if torch.hidden_by is not None:
        return f"CUDA_VISIBLE_DEVICES={torch.hidden_by} hides GPUs from torch; unset it"
    if torch.cuda is None:
        return "this torch is built without CUDA; install the CUDA build: pip install --force-reinstall torch"
    return f"does driver {host.gpu_driver} support CUDA {torch.cuda}? update the driver, or install torch for an older CUDA"


GPUS = Check("gpus", run)
