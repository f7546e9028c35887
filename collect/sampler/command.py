"""`collect sample`: records the telemetry of this machine in a file until a signal arrives."""

from __future__ import annotations

import gc
from pathlib import Path

from collect.sampler import loop
from collect.sampler.gpu import GpuSource
from collect.sampler.host import HostSource
from collect.sampler.nic import NicSource, RdmaSource
from collect.sampler.nvidia_smi import PROGRAM, SmiSource
from shardlab.cell import FASTEST_HZ
from shardlab.console import Output
from shardlab.errors import InputError


def sample(out: Path, hz: float, parent: int | None, played: Path | None, output: Output) -> int:
    """Record samples until a signal arrives or the process with the id `parent` has ended. Returns exit code 0.

    out: the file of the samples. hz: samples per second. played: a stub of NVML, whose GPU values are made up; None for real
    GPUs. Raises InputError if hz is not allowed or the stub cannot be loaded, WorkspaceError if `out` cannot be written.
    """
    if not 0 < hz <= FASTEST_HZ:
        raise InputError(f"--hz: found {hz:g}. Allowed: more than 0, at most {FASTEST_HZ:g}.")
    gpus: GpuSource | SmiSource = GpuSource(played)
    if gpus.why_absent and played is None:
        output.detail(f"{gpus.why_absent}; trying {PROGRAM}")
        gpus = SmiSource(hz)
    if gpus.why_absent:
        output.detail(f"no GPU telemetry: {gpus.why_absent}")
    gc.freeze()  # the garbage collector does not search the modules again and again, which would cost more than the columns
    tally = loop.run(out, hz, parent, [HostSource(), NicSource(), RdmaSource(), gpus])
    faults = [f"{what} could not be read {count} times" for what, count in tally.failures.items()]
    faults += [f"{what} not supported by {count}" for what, count in tally.unsupported.items()]
    output.remark("; ".join([f"{tally.samples} samples written, {tally.missed} samples missed", *faults, *tally.remarks]))
    output.document(tally)
    return 0
