"""Checks an all-reduce of two ranks on a node, which needs all that training needs of torch, NCCL or Gloo, and the network."""

from __future__ import annotations

import re

import msgspec

from provision.check import Check, Outcome
from provision.checks import trial
from provision.checks.trial import RANKS, RANKS_S
from provision.fact import decode
from provision.facts.host import HOST
from provision.node import last_line
from provision.operation import Site, Target
from shardlab.remote import CommandOutput

FORMULA = "2(n-1)/n x bytes / time"  # as nccl-tests defines the bus bandwidth of an all-reduce


class AllReduceReport(msgspec.Struct, frozen=True):
    """What rank 0 prints. `wrong` counts elements over all ranks; `time_s` is the median of the slowest rank's times;
    `clock_spread_s` is the largest difference of the clocks when all ranks left the same barrier, which adds its own delay."""

    backend: str
    ranks: int
    bytes: int
    wrong: int
    iterations: int
    time_s: float
    clock_spread_s: float | None = None


def run(site: Site, target: Target) -> Outcome:
    """Passed if the ranks of this node sum exactly."""
    summed = trial.of(target).all_reduce
    if summed is None:
        return Outcome(None, "needs torch")
    return judge(summed, cores=target.facts[HOST].cpus_allowed)


def bus_bandwidth(ranks: int, size_bytes: int, time_s: float) -> float:
    """Bytes per second on each link in an all-reduce of `size_bytes`, independent of the algorithm."""
    return 2 * (ranks - 1) / ranks * size_bytes / time_s


def judge(answer: CommandOutput, *, cores: int) -> Outcome:
    """Passed if every element of the sum is exact on every rank."""
    what = f"{RANKS}-rank all-reduce"
    if answer.code is None:
        advice = (
            f"is the loopback interface up (ip link show lo), or the machine overloaded ({cores} cores)? -v shows the output"
        )
        return Outcome(False, f"the {what} did not end within {RANKS_S:g} s", advice, transcript=answer.stderr)
    if answer.code != 0:
        advice = "is the loopback interface up (ip link show lo), or is /dev/shm full (df /dev/shm)? -v shows the output"
        return Outcome(False, f"the {what} failed: {cause(answer)}", advice, transcript=answer.stderr)
    try:
        report = decode(answer.stdout, AllReduceReport)
    except ValueError as error:
        return Outcome(False, f"the output of the {what} cannot be read: {error}", "try again: provision CLUSTER.yaml verify")
    if report.wrong:
        says = f"the {what} ({report.backend}) gave {report.wrong} wrong sums"
        return Outcome(False, says, "do not train here: check the memory, the GPUs (nvidia-smi -q -d ECC) and the driver")
    rate = bus_bandwidth(report.ranks, report.bytes, report.time_s) / 1e9
    size = f"{report.bytes / 2**20:g} MiB"
    says = f"{what} of {size} ({report.backend}) is exact; bus bandwidth {rate:.2f} GB/s ({FORMULA})"
    measured: dict[str, float | int | str] = {
        "backend": report.backend,
        "ranks": report.ranks,
        "bytes": report.bytes,
        "iterations": report.iterations,
        "time_s": report.time_s,
        "bus_bandwidth_gb_per_s": rate,
        "formula": FORMULA,
    }
    return Outcome(True, says, measured=measured)


def why_not(answer: CommandOutput, limit_s: float) -> str:
    """Why a program of ours failed, or that it did not end."""
    return f"it did not end within {limit_s:g} s" if answer.code is None else cause(answer)


def cause(answer: CommandOutput) -> str:
    """The line with the error of a rank; libraries may print other lines after it."""
    pattern = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE)
    errors = pattern.findall(answer.stderr)
    return str(errors[-1]) if errors else last_line(answer)


ALL_REDUCE = Check("all_reduce", run)
