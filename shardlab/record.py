"""The records that a rank, a node and a run write, one JSON object per line, and a reader that copes with torn lines.

Times: `t_s` is the monotonic clock in seconds since boot, `wall_s` is seconds since the epoch. Sizes are bytes. A
value that could not be read is absent, never 0.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import WorkspaceError

SCHEMA = 1
CLOCK = "clock"  # event: how far the clock of the event's host was from that of rank 0's host, at the start or end of a run
SAMPLER_ENDED = "sampler_ended"  # event: the sampler of the event's host ended while the run went on; `code` is its exit code
TRACKER_ENDED = "tracker_ended"  # event: the process that logs the run to a tracker failed; `code` is its exit code
_NO_OBJECT = re.compile(rb"\n[^{]")
_UNFINISHED = "Input data was truncated"  # msgspec's words for the beginning of a record


class Record(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):  # no record is part of a cycle
    """A line of a record file. Unknown fields are ignored, so that older readers understand newer writers."""


class StepRecord(Record, kw_only=True):
    """One optimizer step on one rank.

    step: 1, 2, ... for the timed steps; warm-up steps come first, have `warmup` true, and are counted separately.
    units: units of data of this rank in the step; ranks that share one model (tensor and pipeline parallel) share a slice of
    the batch and record the same units.
    step_ms: time from the request for data to the end of the update.
    loss: mean over this rank's part of the batch, before the update; absent if the rank had no data in the step.
    data_ms, forward_ms, backward_ms, optimizer_ms: parts of step_ms.
    allocated_bytes, reserved_bytes: peak of the GPU allocator since the start of the step; absent without a GPU.
    rss_bytes: resident memory of the process after the step.
    cpu_s: processor time of the process since its start, all its threads.
    disk_read_bytes, disk_write_bytes: what the process read from storage and wrote to it since its start, NFS included.
    watched: an instrument slowed the step down, or it was the warm-up of a run that resumes from a checkpoint; its loss is
    used, its times and sizes are not.
    """

    schema: int
    step: int
    t_s: float
    wall_s: float
    units: int
    step_ms: float
    loss: float | None = None
    data_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None
    cpu_s: float | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    warmup: bool = False
    watched: bool = False


class ValidationRecord(Record, kw_only=True):
    """Loss and accuracy on the validation split after `step` timed steps.

    loss: mean over the items. accuracy: share of the targets (labels, or next tokens) whose likeliest class was right, 0 to 1.
    """

    schema: int
    step: int
    t_s: float
    wall_s: float
    loss: float
    accuracy: float
    items: int


class GpuSample(Record, kw_only=True):
    """One GPU, or one MIG instance of a GPU, at a moment. Its counters begin when its driver is loaded."""

    uuid: str
    mig_of: str | None = None  # if this is a MIG instance: the UUID of the GPU that it is a part of
    lost: bool = False  # the driver does not reach the GPU any more; nothing else is known then
    utilization_pct: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    energy_j: float | None = None  # counter
    pcie_rx_bytes: int | None = None  # counter, like the next five
    pcie_tx_bytes: int | None = None
    nvlink_rx_bytes: int | None = None  # over all links, without protocol overhead
    nvlink_tx_bytes: int | None = None
    ecc_corrected: int | None = None  # errors
    ecc_uncorrected: int | None = None
    processes: int | None = None  # number of processes of all users that compute on the GPU
    throttled: list[str] | None = None  # reasons why its clocks are lowered: values of `shardlab.nvml.THROTTLES`
    xids: list[int] | None = None  # numbers of the errors that the driver reported since the sample before


class NicSample(Record, kw_only=True):
    """One network interface at a moment: counters of the kernel, and of the driver from `wire_rx_bytes` on."""

    name: str
    kind: str  # loopback, physical or virtual
    mac: str | None = None
    pci: str | None = None
    rx_bytes: int | None = None  # without RDMA, as the kernel does not see it
    tx_bytes: int | None = None
    rx_packets: int | None = None
    tx_packets: int | None = None
    rx_errors: int | None = None
    tx_errors: int | None = None
    rx_dropped: int | None = None
    tx_dropped: int | None = None
    wire_rx_bytes: int | None = None  # everything on the wire, RDMA and Ethernet headers included
    wire_tx_bytes: int | None = None
    rdma_rx_bytes: int | None = None
    rdma_tx_bytes: int | None = None
    rx_pauses: int | None = None  # pause frames
    tx_pauses: int | None = None
    rx_priority_pauses: int | None = None  # the same of all traffic classes, as RoCE uses them
    tx_priority_pauses: int | None = None
    rx_discards: int | None = None  # packets that the card dropped
    rx_crc_errors: int | None = None
    rx_out_of_buffer: int | None = None  # packets dropped because the receiver had no buffer


class RdmaSample(Record, kw_only=True):
    """One port of an RDMA device at a moment: its counters. rx_bytes, tx_bytes: payload and headers of RDMA."""

    device: str
    port: int
    link_layer: str | None = None  # InfiniBand or Ethernet
    pci: str | None = None
    rx_bytes: int | None = None
    tx_bytes: int | None = None
    wait: int | None = None  # ticks in which data waited because the other end gave no credit
    rx_errors: int | None = None
    tx_discards: int | None = None
    link_downed: int | None = None


class Sample(Record, kw_only=True):
    """One host at a moment.

    cpu_pct: share of all processors that was busy since the sample before, 0 to 100; cores_pct: the same of each processor.
    *_pressure_s: counter of the seconds in which a task of the host waited for it (pressure stall information).
    disk_*_bytes: counters of all physical disks; nfs_*_bytes: counters of what NFS servers sent and were sent.
    """

    schema: int
    t_s: float
    wall_s: float
    host: str
    boot_id: str
    started_hz: float | None = None  # the samples per second that were asked for; in the first sample of a sampler process
    cpu_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    cores_pct: list[float] | None = None
    cpu_pressure_s: float | None = None
    memory_pressure_s: float | None = None
    io_pressure_s: float | None = None
    nfs_read_bytes: int | None = None
    nfs_write_bytes: int | None = None
    gpus: list[GpuSample] | None = None
    nics: list[NicSample] | None = None
    rdma: list[RdmaSample] | None = None


class ClockOffset(msgspec.Struct, frozen=True):
    """offset_s: the clock of a host minus that of rank 0's host; the true difference is within_s of it at most."""

    offset_s: float
    within_s: float


class Event(Record, kw_only=True):
    """An event of a run, recorded by one writer; `data` has its details."""

    schema: int
    event: str
    writer: str
    wall_s: float
    host: str
    data: dict[str, Any] = {}


class Spread(msgspec.Struct, frozen=True, omit_defaults=True):
    """The distribution of n measurements; p5 and p95 are linear percentiles."""

    median: float
    mean: float
    p5: float
    p95: float
    n: int


class SameWork(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Whether a cell did the same work as one process. why: a sentence. verdict:

    proven        it did, within the tolerance of its precision
    different     it did not
    other work    it does other work by design: the strategy says so
    not provable  it should do the same work, but no proof is possible
    not proven    no proof was requested

    Differences are relative (see trainers/proof.py). communication_bytes: bytes that all ranks together send in one step:
    theory; counted, if they were counted; textbook, if textbooks state a formula; wire, what the backend's own algorithms send
    for the counted collectives, or else for those of the theory (absent in results of older releases).
    """

    verdict: Literal["proven", "different", "other work", "not provable", "not proven"]
    why: str
    loss_difference: float | None = None
    gradient_norm_difference: float | None = None
    parameter_difference: float | None = None
    communication_bytes: dict[str, float] | None = None
    proof_s: float | None = None


class Result(msgspec.Struct, omit_defaults=True, kw_only=True):
    """result.json: the result of one run. It is written last: if it exists, the run is complete."""

    schema: int
    run_id: str
    state: str
    rehearsal: bool
    steps: int
    unit: str
    resumed_from_step: int | None = None  # timed steps before the checkpoint; an earlier start recorded them
    final_loss: float | None = None
    final_accuracy: float | None = None  # on the validation split after the last step, 0 to 1
    throughput_per_s: float | None = None
    step_time_ms: Spread | None = None
    train_time_s: float | None = None  # over all parts of a resumed run; repeated steps count once
    epoch_time_s: list[float] | None = None
    peak_memory_bytes: dict[str, int] | None = (
        None  # allocated and reserved on GPUs, rss, by category where measured: worst rank
    )
    parameters: int | None = None
    flops_per_unit: float | None = None  # forward and backward, by the workload's formula
    same_work: SameWork | None = None
    communication_bytes: dict[str, float] | None = None  # in one step, all ranks; see SameWork
    data: dict[str, Any] = {}  # name, sha256, synthetic
    instruments: dict[str, dict[str, Any]] = {}  # by name: what it found, cost_s between steps, watched_steps
    knobs: dict[str, dict[str, Any]] = {}  # asked, effective
    versions: dict[str, str] = {}
    gpus: list[str] | None = None  # UUIDs of the GPUs that ranks trained on, as NVML prints them; None: an older result

    @property
    def resumed(self) -> bool:
        """Whether it resumed from a checkpoint: then it did not run all the time between its first and its last timed step."""
        return self.resumed_from_step is not None


T = TypeVar("T")


class RecordLines(msgspec.Struct, Generic[T]):
    """The records of one file, and whether parts of the file could not be read."""

    records: list[T]
    truncated: bool = False  # the last line is cut: the writer was killed, or is writing it now
    corrupt: int = 0  # number of complete lines that are not such a record


def read_lines(path: Path | str, kind: type[T]) -> RecordLines[T]:
    """Read a record file. A torn last line is noted, a bad line is counted; neither stops the reading.

    A file that is not there gives no records.
    """
    try:
        raw = files.read(path)
    except FileNotFoundError:
        return RecordLines([])
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    of_kind = decoder(kind)
    try:
        # All at once is several times as fast as line by line, and the same where every line begins an object and ends one.
        records = of_kind.decode_lines(raw)
        if len(records) == raw.count(b"\n") and raw[:1] == b"{" and raw[-2:] == b"}\n" and not _NO_OBJECT.search(raw):
            return RecordLines(records)
    except DECODE_FAULTS:
        pass
    lines = RecordLines[T]([])
    parts = raw.split(b"\n")
    tail = parts.pop()
    for part in parts:
        try:
            lines.records.append(of_kind.decode(part))
        except DECODE_FAULTS:
            lines.corrupt += 1
    if tail:
        try:
            lines.records.append(of_kind.decode(tail))
        except DECODE_FAULTS:
            lines.truncated = True
    return lines


def damaged_line(path: Path | str, kind: type[Record]) -> tuple[int, str] | None:
    """(number from 1, why) of the first line that cannot be read; None if there is none.

    A line that a killed writer left unfinished is no damage: the next writer starts a new line behind it.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(files.read(path).split(b"\n")[:-1], start=1):
        try:
            decoder.decode(line)
        except DECODE_FAULTS as error:
            if line and not (line.startswith(b"{") and str(error) == _UNFINISHED):
                return number, str(error)
    return None


class LineWriter:
    """Appends records to a file, each in one write, so that a kill tears at most the last line."""

    _HOW = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._path = path
        try:
            try:
                self._descriptor = os.open(path, self._HOW, 0o644)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(path, self._HOW, 0o644)
            if (size := os.fstat(self._descriptor).st_size) and not _ends_line(path, size):
                os.write(self._descriptor, b"\n")  # a torn line of an earlier writer stays a line of its own
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "write") from error

    def write(self, record: Record, *, sync: bool = False) -> None:
        """Append one record. sync: if losing the record would lose a result. Raises WorkspaceError."""
        line = self._encoder.encode(record) + b"\n"
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # the disk filled in mid-line: the second write names the error
                os.write(self._descriptor, line[written:])
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            error.filename = str(self._path)
            raise WorkspaceError.from_os_error(error, "write") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ends_line(path: Path, size: int) -> bool:
    with path.open("rb") as handle:
        handle.seek(size - 1)
        return handle.read(1) == b"\n"
