"""Checks an all-reduce of two ranks on one node, which uses the same parts of torch, and NCCL or Gloo, as training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from provision.check import Check, Outcome
from provision.checks import trial
from provision.checks.trial import RANKS_S, TRIAL_RANKS
from provision.fact import decode_last_line
from provision.facts.host import HOST
from provision.node import find_error_line
from provision.operation import Site, Target
from shardlab.cluster.all_reduce import AllReduceTime, MeasuredAllReduce, compute_bus_bandwidth
from shardlab.hardware.host import Host
from shardlab.remote.remote import CommandOutput

BUS_BANDWIDTH_FORMULA = "2(n-1)/n x bytes / time"  # the bus bandwidth of an all-reduce over n ranks, as nccl-tests defines it


class AllReduceReport(msgspec.Struct, frozen=True):
    """The report on an all-reduce that rank 0 prints as JSON."""

    backend: str
    """Gloo or nccl."""
    ranks: int
    bytes: int
    """Largest size of the tensor that each rank contributes."""
    wrong: int
    """Number of wrong elements, summed over all ranks and iterations."""
    iterations: int
    time_s: float
    """Seconds of an iteration of this size on its slowest rank: the median over the iterations."""
    clock_spread_s: float | None = None
    """Largest difference of the ranks' clocks, which includes the delay of a barrier."""
    times: tuple[AllReduceTime, ...] = ()
    """The times for all sizes of tensors, from the smallest size to the largest."""


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if the ranks of this node sum exactly."""
    rank_output = trial.run_trial(target).all_reduce
    if rank_output is None:
        return Outcome(None, "needs torch")
    outcome = judge_all_reduce(rank_output, cores=target.facts[HOST].cpus_allowed)
    return add_measurement(outcome, rank_output, [target.node.name], find_first_gpu_name(target.facts[HOST]))


def add_measurement(outcome: Outcome, rank_output: CommandOutput, node_names: Sequence[str], gpu_name: str | None) -> Outcome:
    """The outcome of a check, to which the measured times for the inventory are added if the check passed.

    rank_output: the output of the ranks. node_names: the names of the nodes of the ranks. gpu_name: NVML's name of the GPUs, if
    NCCL was used."""
    if not outcome.passed or (measurement := read_measurement(rank_output, node_names, gpu_name)) is None:
        return outcome
    return msgspec.structs.replace(outcome, all_reduces=(measurement,))


def read_measurement(rank_output: CommandOutput, node_names: Sequence[str], gpu_name: str | None) -> MeasuredAllReduce | None:
    """The all-reduce of the ranks; None if their report has no times. rank_output, node_names, gpu_name: as for
    `add_measurement`."""
    try:
        report = read_report(rank_output)
        measurement = MeasuredAllReduce(
            tuple(node_names),
            report.ranks,
            report.backend,  # type: ignore[arg-type]  # checked below
            gpu_name if report.backend == "nccl" else None,
            datetime.now(UTC).replace(microsecond=0).isoformat(),
            report.times,
        )
        return msgspec.convert(msgspec.to_builtins(measurement), MeasuredAllReduce)
    except ValueError:  # msgspec.ValidationError is a subclass of ValueError
        return None


def read_report(rank_output: CommandOutput) -> AllReduceReport:
    """The report of rank 0, which is one line of its output: NCCL may print lines before and after it. Raises ValueError."""
    line = next((line for line in rank_output.stdout.splitlines() if '"iterations"' in line), rank_output.stdout)
    return decode_last_line(line, AllReduceReport)


def find_first_gpu_name(host: Host) -> str | None:
    """NVML's name of the first GPU of a node; None if the node has no GPU."""
    return host.gpus[0].name if host.gpus else None


def judge_all_reduce(rank_output: CommandOutput, *, cores: int) -> Outcome:
    """Returns a passed Outcome if every element of the sum is exact on every rank."""
    test = f"{TRIAL_RANKS}-rank all-reduce"
    if rank_output.code is None:
        advice = (
            f"is the loopback interface up (ip link show lo), or the machine overloaded ({cores} cores)? -v shows the output"
        )
        return Outcome(False, f"the {test} did not end within {RANKS_S:g} s", advice, transcript=rank_output.stderr)
    if rank_output.code != 0:
        advice = "is the loopback interface up (ip link show lo), or is /dev/shm full (df /dev/shm)? -v shows the output"
        return Outcome(False, f"the {test} failed: {find_python_error(rank_output)}", advice, transcript=rank_output.stderr)
    try:
        report = read_report(rank_output)
    except ValueError as error:
        return Outcome(False, f"the output of the {test} cannot be read: {error}", "try again: provision CLUSTER.yaml verify")
    if report.wrong:
        sentence = f"the {test} ({report.backend}) gave {report.wrong} wrong sums"
        return Outcome(False, sentence, "do not train here: check the memory, the GPUs (nvidia-smi -q -d ECC) and the driver")
    gb_per_s = compute_bus_bandwidth(report.ranks, report.bytes, report.time_s) / 1e9
    size_text = f"{report.bytes / 2**20:g} MiB"
    sentence = f"{test} of {size_text} ({report.backend}) is exact; bus bandwidth {gb_per_s:.2f} GB/s ({BUS_BANDWIDTH_FORMULA})"
    measured_values: dict[str, float | int | str] = {
        "backend": report.backend,
        "ranks": report.ranks,
        "bytes": report.bytes,
        "iterations": report.iterations,
        "time_s": report.time_s,
        "bus_bandwidth_gb_per_s": gb_per_s,
        "formula": BUS_BANDWIDTH_FORMULA,
    }
    return Outcome(True, sentence, measured=measured_values)


def explain_failure(program_output: CommandOutput, limit_s: float) -> str:
    """Why a test program failed: its error, or a sentence that it did not end within `limit_s` seconds."""
    return f"it did not end within {limit_s:g} s" if program_output.code is None else find_python_error(program_output)


def find_python_error(program_output: CommandOutput) -> str:
    """The line with the last Python error in the error output; libraries may print other lines after it."""
    error_pattern = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE)
    error_lines = error_pattern.findall(program_output.stderr)
    return str(error_lines[-1]) if error_lines else find_error_line(program_output)


ALL_REDUCE = Check("all_reduce", run)
