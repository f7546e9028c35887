"""Two ranks that meet and sum exactly have shown everything that training needs of torch, NCCL or Gloo, and the network."""

from __future__ import annotations

import re

import msgspec

from provision.checks import Check, Outcome
from provision.facts import decode, last_line
from provision.facts.host import HOST
from provision.facts.torch import TORCH
from provision.operations import Site, Target
from provision.providers import Answer

RANKS = 2
TIMEOUT_S = 120.0  # 8 s on two slow cores; the ranks themselves give up waiting for one another after 60 s
FORMULA = "2(n-1)/n x bytes / time"  # as nccl-tests defines the bus bandwidth of an all-reduce


class Report(msgspec.Struct, frozen=True):
    """What rank 0 prints. `wrong` counts elements over all ranks; `time_s` is the median of the slowest rank's times."""

    backend: str
    ranks: int
    bytes: int
    wrong: int
    iterations: int
    time_s: float


def run(site: Site, target: Target) -> Outcome:
    torch, host = target.facts[TORCH], target.facts[HOST]
    if torch.version is None:
        return Outcome(None, "needs torch")
    backend = "nccl" if torch.gpus and torch.gpus >= RANKS and "nccl" in torch.backends else "gloo"
    answer = target.node.run(command(target.node.python, backend), timeout_s=TIMEOUT_S, env=environment(backend))
    return judge(answer, cores=host.cpus_allowed)


def command(python: str, backend: str) -> list[str]:
    """The program that starts the ranks by torchrun."""
    return [python, "-m", "provision.checks._all_reduce_ranks", "launch", backend, str(RANKS)]


def environment(backend: str) -> dict[str, str]:
    """Loopback for Gloo, which would otherwise resolve the host's name; NCCL finds its own way between GPUs."""
    threads = {"OMP_NUM_THREADS": "1"}
    return threads | ({"GLOO_SOCKET_IFNAME": "lo"} if backend == "gloo" else {"NCCL_SOCKET_IFNAME": "lo"})


def bus_bandwidth(ranks: int, size_bytes: int, time_s: float) -> float:
    """Bytes per second that each link carries in an all-reduce of `size_bytes`, whatever the algorithm."""
    return 2 * (ranks - 1) / ranks * size_bytes / time_s


def judge(answer: Answer, *, cores: int) -> Outcome:
    """Passed where every element of the sum is exact on every rank."""
    what = f"{RANKS}-rank all-reduce"
    if answer.code is None:
        advice = (
            f"is the loopback interface up (ip link show lo), or the machine overloaded ({cores} cores)? -v shows all output"
        )
        return Outcome(False, f"the {what} did not end within {TIMEOUT_S:g} s", advice, transcript=answer.stderr)
    if answer.code != 0:
        advice = "is the loopback interface up (ip link show lo), and /dev/shm not full (df /dev/shm)? -v shows all output"
        return Outcome(False, f"the {what} failed: {cause(answer)}", advice, transcript=answer.stderr)
    try:
        report = decode(answer.stdout, Report)
    except ValueError as error:
        return Outcome(False, f"the {what} cannot be read: {error}", "try again: provision CLUSTER.yaml verify")
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


def why_not(answer: Answer, limit_s: float) -> str:
    """Of a program of ours that failed, or did not end."""
    return f"it did not end within {limit_s:g} s" if answer.code is None else cause(answer)


def cause(answer: Answer) -> str:
    """The line in which a rank says what went wrong, rather than torchrun's summary after it."""
    pattern = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE)
    found = pattern.findall(answer.stderr)
    return str(found[-1]) if found else last_line(answer)


ALL_REDUCE = Check("all_reduce", run)
