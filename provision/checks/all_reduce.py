"""Checks an all-reduce of two ranks on one node. It uses the same parts of torch, NCCL or Gloo, and the network as training."""

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

FORMULA = "2(n-1)/n x bytes / time"  # the bus bandwidth of an all-reduce, as nccl-tests defines it


class AllReduceReport(msgspec.Struct, frozen=True):
    """The report that rank 0 prints as JSON."""

    backend: str  # gloo or nccl
    ranks: int
    bytes: int  # size of the tensor that each rank contributes
    wrong: int  # number of wrong elements, summed over all ranks and iterations
    iterations: int
    time_s: float  # seconds of an iteration on its slowest rank: the median over the iterations
    clock_spread_s: float | None = None  # largest difference of the ranks' clocks after one barrier; includes its delay


def run(site: Site, target: Target) -> Outcome:
    """Passed if the ranks of this node sum exactly."""
    summed = trial.of(target).all_reduce
    if summed is None:
        return Outcome(None, "needs torch")
    return judge(summed, cores=target.facts[HOST].cpus_allowed)


def bus_bandwidth(ranks: int, size_bytes: int, time_s: float) -> float:
    """The bus bandwidth of an all-reduce in bytes per second, which is comparable for any number of ranks.

    size_bytes: the size of the tensor of one rank. time_s: the time of one all-reduce in seconds.
    """
    return 2 * (ranks - 1) / ranks * size_bytes / time_s


def judge(answer: CommandOutput, *, cores: int) -> Outcome:
    """Passed if every element of the sum is exact on every rank. cores: the CPU cores of the node, for the advice."""
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
    """Why a test program failed: its error, or that it did not end within `limit_s` seconds."""
    return f"it did not end within {limit_s:g} s" if answer.code is None else cause(answer)


def cause(answer: CommandOutput) -> str:
    """The line with the last Python error in the error output; libraries may print other lines after it."""
    pattern = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE)
    errors = pattern.findall(answer.stderr)
    return str(errors[-1]) if errors else last_line(answer)


ALL_REDUCE = Check("all_reduce", run)
