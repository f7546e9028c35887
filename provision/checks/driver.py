"""Checks that all parts of the driver have one version, that no GPU is missing, and that each GPU computes exactly."""

from __future__ import annotations

import msgspec

from provision.check import Check, Outcome
from provision.checks import trial
from provision.checks.all_reduce import explain_failure
from provision.checks.trial import PRODUCT_S
from provision.fact import decode_last_line
from provision.facts.nvidia import NVIDIA, Nvidia
from provision.facts.system import SYSTEM
from provision.operation import Site, Target
from shardlab.remote.remote import CommandOutput


class ProductReport(msgspec.Struct, frozen=True):
    """The report that the test program of the matrix product (_matmul.py) prints as JSON."""

    wrong: list[int]
    """For each GPU, the number of wrong elements of the matrix product."""


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if the driver is complete, the number of GPUs is right, and each GPU computes exactly."""
    requested_gpus = site.cluster.gpus.per_node if site.cluster.gpus else 0
    if target.facts[SYSTEM].is_container:
        return Outcome(None, "it is a container: its GPUs, if any, belong to its host")
    if not requested_gpus or not target.has_role("worker"):
        return Outcome(None, "the cluster file requests no GPUs for it")
    nvidia = target.facts[NVIDIA]
    if (driver_fault := judge_driver(nvidia, requested_gpus)) is not None:
        return driver_fault
    torch_trial = trial.run_trial(target)
    if torch_trial.product is None:
        no_gpu_reason = torch_trial.torch.why_absent or torch_trial.torch.why_no_gpus or "torch sees none"
        return Outcome(False, f"no GPU could compute: {no_gpu_reason}", "see the checks torch and gpus")
    return judge_product(torch_trial.product, nvidia)


def judge_driver(nvidia: Nvidia, gpus: int) -> Outcome | None:
    """An Outcome that says what is wrong with the driver or the number of GPUs; None if nothing is wrong.

    gpus: the number of GPUs per node that the cluster file requests.
    """
    if not nvidia.works:
        nouveau_clause = ", and nouveau is loaded" if nvidia.nouveau else ""
        nvml_clause = f"; nvidia-smi: {nvidia.why_no_nvml}" if nvidia.why_no_nvml else ""
        text = f"the driver is incomplete, or its parts differ in version ({nvidia.versions}{nouveau_clause}){nvml_clause}"
        return Outcome(False, text, "run: provision CLUSTER.yaml --only nvidia, which repairs the driver or says why it cannot")
    if nvidia.faults:
        return Outcome(False, f"a GPU does not answer nvidia-smi: {'; '.join(nvidia.faults)}", "see: sudo dmesg | grep -i xid")
    if not len(nvidia.gpus) == len(nvidia.seen) == gpus:
        text = f"the cluster file requests {gpus} GPUs, the PCI bus has {len(nvidia.gpus)}, the driver sees {len(nvidia.seen)}"
        return Outcome(
            False, text, "a missing GPU may have fallen off the bus (sudo dmesg | grep -i xid); else correct gpus.per_node"
        )
    return None


def judge_product(program_output: CommandOutput, nvidia: Nvidia) -> Outcome:
    """Returns a passed Outcome if every element is exact on every GPU that the driver sees."""
    if program_output.code != 0:
        failure_text = explain_failure(program_output, PRODUCT_S)
        advice = "does torch see the GPUs (the check gpus)? -v shows all output"
        return Outcome(False, f"a matrix product on the GPUs failed: {failure_text}", advice, transcript=program_output.stderr)
    try:
        bad_counts = decode_last_line(program_output.stdout, ProductReport).wrong
    except ValueError as error:
        return Outcome(False, f"the matrix product printed no result: {error}", "try again: provision CLUSTER.yaml verify")
    if len(bad_counts) != len(nvidia.seen):
        sentence = f"torch computed on {len(bad_counts)} of {len(nvidia.seen)} GPUs"
        return Outcome(False, sentence, "is CUDA_VISIBLE_DEVICES set, or torch built for another CUDA? see the check gpus")
    faulty_gpus = [f"GPU {gpu_index}: {wrong_count}" for gpu_index, wrong_count in enumerate(bad_counts) if wrong_count]
    if faulty_gpus:
        sentence = f"wrong elements in a matrix product: {', '.join(faulty_gpus)}"
        return Outcome(False, sentence, "do not train here: look at nvidia-smi -q -d ECC")
    measured_values: dict[str, float | int | str] = {"gpus": len(bad_counts), "driver": nvidia.nvml or ""}
    sentence = f"all parts of the driver have version {nvidia.nvml}; {len(bad_counts)} x {nvidia.seen[0].name} compute exactly"
    sentence += "".join(f"; nvidia-smi warns: {remark}" for remark in nvidia.remarks)
    return Outcome(True, sentence, measured=measured_values)


DRIVER_WORKS = Check("driver", run)
