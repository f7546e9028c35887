"""The main loop of the sampler, which takes samples on a fixed schedule that does not drift."""

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
from collect.sampler.nvidia_smi import SMI_PROGRAM, SmiSource
from collect.sampler.source import TelemetrySource
from shardlab.errors import InputError
from shardlab.hardware import host
from shardlab.matrix.cell import FASTEST_HZ
from shardlab.runs.record import SCHEMA, LineWriter, Sample
from shardlab.terminal.console import Output

END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class SamplerTally(msgspec.Struct):
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


def run_sampler(samples_path: Path, hz: float, parent_pid: int | None, sources: Sequence[TelemetrySource]) -> SamplerTally:
    """Write one sample every 1/hz seconds to `samples_path` until a signal arrives or the process `parent_pid` has ended.

    A sample that is missed is skipped and not taken later, so that the other samples stay on the schedule. After a signal, one
    last sample is written, so that counters are known up to the end. Raises WorkspaceError if `samples_path` cannot be written.
    """
    tally = SamplerTally()
    previous_signal_mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, END_SIGNALS
    )  # signals are blocked, so that none interrupts writing a line
    try:
        parent_start_ticks = _read_start_ticks(parent_pid)
        host_name, boot_id = gethostname(), host.read_boot_id()
        with LineWriter(samples_path) as sample_writer:
            schedule_start_s, tick_number, is_last = time.monotonic(), 0, False
            while True:
                sample = Sample(schema=SCHEMA, t_s=time.monotonic(), wall_s=time.time(), host=host_name, boot_id=boot_id)
                if not tally.samples:
                    sample.started_hz = hz
                for source in sources:
                    source.fill(sample)
                sample_writer.write_record(sample)
                tally.samples += 1
                if is_last or (parent_pid is not None and _has_ended(parent_pid, parent_start_ticks)):
                    break
                next_tick_number = int((time.monotonic() - schedule_start_s) * hz) + 1
                tally.missed += next_tick_number - tick_number - 1
                tick_number = next_tick_number
                wait_s = max(schedule_start_s + tick_number / hz - time.monotonic(), 0)
                is_last = signal.sigtimedwait(END_SIGNALS, wait_s) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_signal_mask)
    for source in sources:
        source.close()
        tally.failures |= source.failures
        tally.unsupported |= source.unsupported
        tally.remarks += source.remarks
    return tally


def _read_start_ticks(pid: int | None) -> bytes | None:
    """The start time of a process, in clock ticks since boot; None if there is no such process, or if `pid` is None."""
    try:
        stat_fields = _read_stat_fields(pid) if pid is not None else None
    except (OSError, IndexError):
        return None
    return stat_fields[19] if stat_fields else None


def _has_ended(pid: int, start_ticks: bytes | None) -> bool:
    """Whether a process has ended. A zombie counts as ended, and also a process with another start time and the same id."""
    try:
        stat_fields = _read_stat_fields(pid)
    except (OSError, IndexError):
        return True
    return stat_fields[0] in (b"Z", b"X") or stat_fields[19] != start_ticks


def _read_stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third field on.

    The second field, the name of the program, may contain any character. It ends at the last closing parenthesis.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def record_samples(samples_path: Path, hz: float, parent_pid: int | None, stub_file: Path | None, output: Output) -> int:
    """Record samples in the file `samples_path`, `hz` per second, until a signal arrives or `parent_pid` has ended. Returns
    exit code 0.

    stub_file: a stub of NVML, whose GPU values are made up; None for real GPUs. Raises InputError if hz is not allowed or the
    stub cannot be loaded, WorkspaceError if `samples_path` cannot be written."""
    if not 0 < hz <= FASTEST_HZ:
        raise InputError(f"--hz: found {hz:g}. Allowed: more than 0, at most {FASTEST_HZ:g}.")
    gpu_source: GpuSource | SmiSource = GpuSource(stub_file)
    if gpu_source.why_absent and stub_file is None:
        output.print_detail(f"{gpu_source.why_absent}; trying {SMI_PROGRAM}")
        gpu_source = SmiSource(hz)
    if gpu_source.why_absent:
        output.print_detail(f"no GPU telemetry: {gpu_source.why_absent}")
    gc.freeze()  # the garbage collector does not search the modules again and again
    tally = run_sampler(samples_path, hz, parent_pid, [HostSource(), NicSource(), RdmaSource(), gpu_source])
    faults = [f"{quantity} could not be read {fault_count} times" for quantity, fault_count in tally.failures.items()]
    faults += [f"{quantity} not supported by {fault_count}" for quantity, fault_count in tally.unsupported.items()]
    output.print_remark("; ".join([f"{tally.samples} samples written, {tally.missed} samples missed", *faults, *tally.remarks]))
    output.print_document(tally)
    return 0
