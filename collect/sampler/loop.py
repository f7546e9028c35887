"""The main loop of the sampler. It takes samples on a fixed schedule that does not drift, until a signal or the end of a
process."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from collect.sampler.gpu import GpuSource
from collect.sampler.host import HostSource
from collect.sampler.nic import NicSource, RdmaSource
from collect.sampler.nvidia_smi import PROGRAM, SmiSource
from collect.sampler.source import Source
from shardlab.errors import InputError
from shardlab.hardware import host
from shardlab.matrix.cell import FASTEST_HZ
from shardlab.runs.record import SCHEMA, LineWriter, Sample
from shardlab.terminal.console import Output

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class TickTally(msgspec.Struct):
    """What a sampler did in its lifetime."""

    samples: int = 0
    """The number of samples written."""
    missed: int = 0
    """The number of scheduled samples that were skipped because the machine did not let the sampler run in time."""
    failures: dict[str, int] = {}
    """See `Source`."""
    unsupported: dict[str, int] = {}
    """See `Source`."""
    remarks: list[str] = []
    """See `Source`."""


def run_sampler(out: Path, hz: float, parent: int | None, sources: Sequence[Source]) -> TickTally:
    """Write one sample every 1/hz seconds to `out` until a signal arrives or the process with the id `parent` has ended.

    A sample that is missed is skipped and not taken later, so that the other samples stay on the schedule. After a signal, one
    last sample is written, so that counters are known up to the end. Raises WorkspaceError if `out` cannot be written.
    """
    tally = TickTally()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # signals are blocked, so that none interrupts writing a line
    try:
        start_time = _read_start_time(parent)
        host_name, boot = gethostname(), host.read_boot_id()
        with LineWriter(out) as lines:
            start, tick, ending = time.monotonic(), 0, False
            while True:
                sample = Sample(schema=SCHEMA, t_s=time.monotonic(), wall_s=time.time(), host=host_name, boot_id=boot)
                if not tally.samples:
                    sample.started_hz = hz
                for source in sources:
                    source.fill(sample)
                lines.write(sample)
                tally.samples += 1
                if ending or (parent is not None and _has_ended(parent, start_time)):
                    break
                due = int((time.monotonic() - start) * hz) + 1
                tally.missed += due - tick - 1
                tick = due
                wait = max(start + tick / hz - time.monotonic(), 0)
                ending = signal.sigtimedwait(SIGNALS, wait) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    for source in sources:
        source.close()
        tally.failures |= source.failures
        tally.unsupported |= source.unsupported
        tally.remarks += source.remarks
    return tally


def _read_start_time(pid: int | None) -> bytes | None:
    """The start time of a process, in clock ticks since boot. It distinguishes the process from a later process with the same
    id.

    None if there is no such process, or if `pid` is None.
    """
    try:
        fields = _read_stat_fields(pid) if pid is not None else None
    except (OSError, IndexError):
        return None
    return fields[19] if fields else None


def _has_ended(pid: int, start_time: bytes | None) -> bool:
    """Whether a process has ended. A zombie counts as ended.

    start_time: the start time of the process (`_read_start_time`), because a later process may have the same id.
    """
    try:
        fields = _read_stat_fields(pid)
    except (OSError, IndexError):
        return True
    return fields[0] in (b"Z", b"X") or fields[19] != start_time


def _read_stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third field on.

    The second field, the name of the program, may contain any character, including spaces. It ends at the last closing
    parenthesis.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def record_samples(out: Path, hz: float, parent: int | None, played_file: Path | None, output: Output) -> int:
    """Record samples until a signal arrives or the process with the id `parent` has ended. Returns exit code 0.

    out: the file of the samples. hz: samples per second. played_file: a stub of NVML, whose GPU values are made up; None for
    real GPUs. Raises InputError if hz is not allowed or the stub cannot be loaded, WorkspaceError if `out` cannot be written.
    """
    if not 0 < hz <= FASTEST_HZ:
        raise InputError(f"--hz: found {hz:g}. Allowed: more than 0, at most {FASTEST_HZ:g}.")
    gpus: GpuSource | SmiSource = GpuSource(played_file)
    if gpus.why_absent and played_file is None:
        output.print_detail(f"{gpus.why_absent}; trying {PROGRAM}")
        gpus = SmiSource(hz)
    if gpus.why_absent:
        output.print_detail(f"no GPU telemetry: {gpus.why_absent}")
    gc.freeze()  # the garbage collector does not search the modules again and again
    tally = run_sampler(out, hz, parent, [HostSource(), NicSource(), RdmaSource(), gpus])
    faults = [f"{quantity} could not be read {count} times" for quantity, count in tally.failures.items()]
    faults += [f"{quantity} not supported by {count}" for quantity, count in tally.unsupported.items()]
    output.print_remark("; ".join([f"{tally.samples} samples written, {tally.missed} samples missed", *faults, *tally.remarks]))
    output.print_document(tally)
    return 0
