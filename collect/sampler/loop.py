"""The sampler's clock: a schedule that never drifts, and the two ways it ends, a signal or the end of the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from collect.sampler.source import Source
from shardlab import host
from shardlab.record import SCHEMA, LineWriter, Sample

ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class TickTally(msgspec.Struct):
    """What a sampler did. missed: ticks that passed while the machine did not let it run. The others: see `Source`."""

    samples: int = 0
    missed: int = 0
    failures: dict[str, int] = {}
    unsupported: dict[str, int] = {}
    remarks: list[str] = []


def run(out: Path, hz: float, parent: int | None, sources: Sequence[Source]) -> TickTally:
    """Write one sample per 1/hz seconds to `out` until a signal ends us or the process `parent` is gone.

    A tick that is missed is skipped, not made up for, so that samples stay where the schedule puts them. A signal is followed
    by one last sample, so that counters are known up to the end of what was sampled.
    Raises WorkspaceError where `out` cannot be written.
    """
    tally = TickTally()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # so that a signal waits for the end of a line
    try:
        started = _identity(parent)
        name, boot = gethostname(), host.boot_id()
        with LineWriter(out) as lines:
            start, tick, ending = time.monotonic(), 0, False
            while True:
                sample = Sample(schema=SCHEMA, t_s=time.monotonic(), wall_s=time.time(), host=name, boot_id=boot)
                if not tally.samples:
                    sample.started_hz = hz
                for source in sources:
                    source.fill(sample)
                lines.write(sample)
                tally.samples += 1
                if ending or (parent is not None and _gone(parent, started)):
                    break
                due = int((time.monotonic() - start) * hz) + 1
                tally.missed += due - tick - 1
                tick = due
                wait = max(start + tick / hz - time.monotonic(), 0)
                ending = signal.sigtimedwait(ENDS, wait) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for source in sources:
        source.close()
        tally.failures |= source.failures
        tally.unsupported |= source.unsupported
        tally.remarks += source.remarks
    return tally


def _identity(pid: int | None) -> bytes | None:
    """The start time of a process in clock ticks since boot: with its number, it names one process only."""
    try:
        fields = _fields(pid) if pid is not None else None
    except (OSError, IndexError):
        return None
    return fields[19] if fields else None


def _gone(pid: int, started: bytes | None) -> bool:
    """Whether the process has ended: also when nobody waited for it yet, or its number has a new owner."""
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return True
    return fields[0] in (b"Z", b"X") or fields[19] != started


def _fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from its third field on; the second, the name, may hold anything and ends at the last bracket."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
