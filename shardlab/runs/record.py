"""The records that ranks, nodes and supervisors write, one JSON object per line, with a writer and a reader of record files.

`t_s` is the time of the monotonic clock, in seconds since boot. `wall_s` is in seconds since the epoch. Sizes are in bytes. A
value that could not be measured is absent, never 0. Records of steps are filled in by `Recorder` in trainers/run/loop.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.record_types import (
    BootId,
    Count,
    EventData,
    HostName,
    Integer,
    Measured,
    Milliseconds,
    RunId,
    Seconds,
    Spread,
    WallTime,
    check_numbers,
)  # fmt: skip

SCHEMA = 1
# Names of events.
CLOCK_EVENT = "clock"  # contains the difference between the clock of the event's host and the clock of rank 0's host
SAMPLER_ENDED = "sampler_ended"  # the sampler of the event's host ended while the run continued; `code` is its exit code
TRACKER_ENDED = "tracker_ended"  # the process that logs the run to a tracker failed; `code` is its exit code
_NO_OBJECT = re.compile(rb"\n[^{]")  # a line that does not begin with `{`, so it is not a JSON object
# Msgspec's error message for a line that contains only the beginning of a record
_TRUNCATED_MESSAGE = "Input data was truncated"


class Record(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):  # gc=False, because records contain no cycles
    """A line of a record file. Unknown fields are ignored, so that an older version can read the records of a newer version."""


class StepRecord(Record, kw_only=True):
    """One optimizer step on one rank."""

    schema: Count
    step: Count
    """1, 2, ... for the timed steps. Warm-up steps come first, have `warmup` true, and have their own numbers."""
    t_s: Seconds
    wall_s: WallTime
    units: Count
    """Units of data (images, tokens) of this rank in the step. Ranks that share a model (tp, pp) record the same units."""
    step_ms: Milliseconds
    """Time from the request for data to the end of the update."""
    loss: Measured | None = None
    """Mean loss over this rank's part of the batch, before the update; absent if the rank had no data in the step."""
    data_ms: Milliseconds | None = None
    """The part of `step_ms` in which the rank waits for data."""
    forward_ms: Milliseconds | None = None
    """The part of `step_ms` of the forward pass."""
    backward_ms: Milliseconds | None = None
    """The part of `step_ms` of the backward pass."""
    optimizer_ms: Milliseconds | None = None
    """The part of `step_ms` of the optimizer."""
    allocated_bytes: Count | None = None
    """Peak of the allocated bytes of the GPU allocator since the start of the step; absent without a GPU."""
    reserved_bytes: Count | None = None
    """Peak of the reserved bytes of the GPU allocator since the start of the step; absent without a GPU."""
    rss_bytes: Count | None = None
    """Resident memory of the process after the step."""
    cpu_s: Seconds | None = None
    """Processor time of all threads of the process since its start."""
    disk_read_bytes: Count | None = None
    """Bytes that the process read from storage since its start, NFS included."""
    disk_write_bytes: Count | None = None
    """Bytes that the process wrote to storage since its start, NFS included."""
    warmup: bool = False
    """Whether it is an untimed step."""
    watched: bool = False
    """The times and sizes of the step are not used, but its loss is: an instrument slowed the step down, or the step warmed up
    a run that resumes from a checkpoint."""


class ValidationRecord(Record, kw_only=True):
    """Loss and accuracy on the validation split after `step` timed steps."""

    schema: Count
    step: Count
    """Number of timed steps before the validation."""
    t_s: Seconds
    wall_s: WallTime
    loss: Measured
    """Mean over the items."""
    accuracy: Measured
    """Share of the targets (labels or next tokens) for which the class with the highest score was correct, 0 to 1."""
    items: Count
    """The number of items."""


class GpuSample(Record, kw_only=True):
    """The state of a GPU, or of a MIG instance of a GPU, at one moment. Its counters are 0 when the driver is loaded."""

    uuid: str
    mig_of: str | None = None
    """For a MIG instance: the UUID of the whole GPU."""
    lost: bool = False
    """The driver can no longer reach the GPU; the other fields are then absent."""
    played: bool = False
    """No GPU: a stub of NVML made up the values (`collect sample --played`)."""
    utilization_pct: Measured | None = None
    """Share of the last moments in which a kernel ran, 0 to 100."""
    memory_used_bytes: Count | None = None
    """Of all processes."""
    memory_total_bytes: Count | None = None
    """Only in the first sample of a sampler process."""
    power_w: Measured | None = None
    """Watts."""
    temperature_c: Measured | None = None
    """Degrees Celsius."""
    sm_clock_mhz: Measured | None = None
    """Clock of the multiprocessors."""
    memory_clock_mhz: Measured | None = None
    """Clock of the memory."""
    energy_j: Measured | None = None
    """Counter."""
    pcie_rx_bytes: Count | None = None
    """Counter."""
    pcie_tx_bytes: Count | None = None
    """Counter."""
    nvlink_rx_bytes: Count | None = None
    """Over all links, without protocol overhead."""
    nvlink_tx_bytes: Count | None = None
    """Counter, over all links, without protocol overhead."""
    ecc_corrected: Count | None = None
    """Counter of memory errors that were corrected."""
    ecc_uncorrected: Count | None = None
    """Counter of memory errors that could not be corrected."""
    processes: Count | None = None
    """Number of processes of all users that compute on the GPU."""
    throttled: list[str] | None = None
    """Reasons why the clocks of the GPU are lowered: values of `shardlab.hardware.nvml.THROTTLE_REASON_BY_BIT`."""
    xids: list[Integer] | None = None
    """Numbers of the errors (XID) that the driver reported since the previous sample."""


class NicSample(Record, kw_only=True):
    """The counters of one network interface at one moment. The fields from `wire_rx_bytes` on are counters of the driver, the
    fields before `wire_rx_bytes` are counters of the kernel."""

    name: str
    """Name of the interface, such as eth0."""
    kind: str
    """Loopback, physical or virtual."""
    mac: str | None = None
    pci: str | None = None
    rx_bytes: Count | None = None
    """Without RDMA traffic, which the kernel does not see."""
    tx_bytes: Count | None = None
    """Without RDMA traffic."""
    rx_packets: Count | None = None
    """Packets received."""
    tx_packets: Count | None = None
    """Packets sent."""
    rx_errors: Count | None = None
    """Packets with errors."""
    tx_errors: Count | None = None
    """Packets with errors."""
    rx_dropped: Count | None = None
    """Received packets that were dropped."""
    tx_dropped: Count | None = None
    """Packets to be sent that were dropped."""
    wire_rx_bytes: Count | None = None
    """Everything received on the wire, RDMA and Ethernet headers included."""
    wire_tx_bytes: Count | None = None
    """Everything sent on the wire, RDMA and Ethernet headers included."""
    rdma_rx_bytes: Count | None = None
    """Payload and headers of RDMA."""
    rdma_tx_bytes: Count | None = None
    """Payload and headers of RDMA."""
    rx_pauses: Count | None = None
    """Pause frames."""
    tx_pauses: Count | None = None
    """Pause frames."""
    rx_priority_pauses: Count | None = None
    """Pause frames of single traffic classes (PFC), which RoCE uses; sum of all classes."""
    tx_priority_pauses: Count | None = None
    """Sent pause frames of single traffic classes (PFC); sum of all classes."""
    rx_discards: Count | None = None
    """Packets that the card dropped."""
    rx_crc_errors: Count | None = None
    """Frames whose checksum was wrong."""
    rx_out_of_buffer: Count | None = None
    """Packets dropped because the receiver had no buffer."""
    rx_bandwidth_limited: Count | None = None
    """Packets that the cloud delayed or dropped because the machine received more bytes per second than its limit."""
    tx_bandwidth_limited: Count | None = None
    """Packets that the cloud delayed or dropped because the machine sent more bytes per second than its limit."""
    packet_rate_limited: Count | None = None
    """Packets that the cloud delayed or dropped above the machine's limit of packets per second."""
    connections_limited: Count | None = None
    """Packets that the cloud dropped above the machine's limit of connections."""


class RdmaSample(Record, kw_only=True):
    """The counters of one port of an RDMA device at one moment. A port without any known counter has an entry, too."""

    device: str
    """Name of the device, such as mlx5_0."""
    port: Count
    """Number of the port."""
    link_layer: str | None = None
    """InfiniBand or Ethernet."""
    pci: str | None = None
    rx_bytes: Count | None = None
    """Received payload and headers of RDMA."""
    tx_bytes: Count | None = None
    """Sent payload and headers of RDMA."""
    wait: Count | None = None
    """Clock ticks in which data waited because the other end of the link gave no credit (no buffer)."""
    rx_errors: Count | None = None
    """Packets with errors."""
    tx_discards: Count | None = None
    """Packets that the port could not send."""
    link_downed: Count | None = None
    """How often the link went down."""
    rx_drops: Count | None = None
    """Received packets that the device dropped."""
    read_bytes: Count | None = None
    """Bytes that RDMA reads of this host fetched from others; part of `rx_bytes`."""
    write_bytes: Count | None = None
    """Bytes that RDMA writes of this host stored on others; part of `tx_bytes`."""
    retransmitted_bytes: Count | None = None
    """Bytes that were sent again."""
    retransmitted_packets: Count | None = None
    """Packets that were sent again."""
    retransmission_timeouts: Count | None = None
    """How often no answer came in time."""


class Sample(Record, kw_only=True):
    """The state of one host at one moment."""

    schema: Count
    t_s: Seconds
    wall_s: WallTime
    host: HostName
    boot_id: BootId
    started_hz: Measured | None = None
    """Requested samples per second; only in the first sample of a sampler process."""
    cpu_pct: Measured | None = None
    """Busy share of all processors since the previous sample, 0 to 100."""
    memory_used_bytes: Count | None = None
    """Without memory that the kernel can free at once."""
    memory_total_bytes: Count | None = None
    """Physical memory."""
    disk_read_bytes: Count | None = None
    """Counter of the bytes that all physical disks read."""
    disk_write_bytes: Count | None = None
    """Counter of the bytes that all physical disks wrote."""
    cores_pct: list[Measured] | None = None
    """The same for each processor."""
    cpu_pressure_s: Measured | None = None
    """Counter of the seconds in which a task on the host waited for processors (pressure stall information of the kernel)."""
    memory_pressure_s: Measured | None = None
    """Counter of the seconds in which a task on the host waited for memory."""
    io_pressure_s: Measured | None = None
    """Counter of the seconds in which a task on the host waited for input and output."""
    nfs_read_bytes: Count | None = None
    """Counter of the bytes that NFS servers sent to this host."""
    nfs_write_bytes: Count | None = None
    """Counter of the bytes that NFS servers received from this host."""
    gpus: list[GpuSample] | None = None
    """Null: not measured."""
    nics: list[NicSample] | None = None
    """Null: not measured."""
    rdma: list[RdmaSample] | None = None
    """Null: not measured."""

    @property
    def busiest_core_pct(self) -> float | None:
        """The busy share of the processor that was the busiest, 0 to 100; None if the processors were not measured."""
        return max(self.cores_pct) if self.cores_pct else None


class Event(Record, kw_only=True):
    """An event of a run."""

    schema: Count
    event: str
    """Its kind."""
    writer: str
    """The process that recorded it, as in the file name events.WRITER.jsonl."""
    wall_s: WallTime
    host: HostName
    """Host name of the machine of the writer."""
    data: dict[str, Any] = {}
    """The details of the event."""

    def __post_init__(self) -> None:
        check_numbers(self.data)
        msgspec.convert(self.data, EventData)


class SameWork(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Whether the ranks of a cell together did the same work as one process would do. verdict:

    proven        the work is the same, within the tolerance of the cell's precision
    different     the work is not the same
    other work    the strategy does other work by design
    not provable  the work should be the same, but no proof is possible
    not proven    no proof was requested
    """

    verdict: Literal["proven", "different", "other work", "not provable", "not proven"]
    """One of the five words above."""
    why: str
    """The reason for the verdict, as a sentence."""
    loss_difference: Measured | None = None
    """Relative difference of the losses (see trainers/proof/proof.py)."""
    gradient_norm_difference: Measured | None = None
    """Relative difference of the gradient norms."""
    parameter_difference: Measured | None = None
    """Relative difference of the parameters."""
    communication_bytes: dict[str, Measured] | None = None
    """Bytes that all ranks together send in one step, by the way in which the number was found: theory, a formula; counted,
    collectives that were counted; textbook, a formula of textbooks, if there is one; wire, the bytes that the backend's own
    algorithms send for the counted collectives, or for the collectives of the theory if none were counted (absent in results of
    older releases)."""
    proof_s: Seconds | None = None
    """Duration of the proof in seconds."""


class Result(msgspec.Struct, omit_defaults=True, kw_only=True):
    """result.json: the result of one run. This file is written last: if it exists, the run is complete."""

    schema: Count
    run_id: RunId
    state: str
    rehearsal: bool
    """Whether the times say nothing about speed: ranks on a CPU, a tiny twin, or practice nodes."""
    steps: Count
    """Number of timed steps."""
    unit: str
    """What the throughput counts, such as tokens."""
    resumed_from_step: Count | None = None
    """Number of timed steps before the checkpoint, which an earlier attempt recorded."""
    final_loss: Measured | None = None
    """Mean over all ranks in the last step."""
    final_accuracy: Measured | None = None
    """On the validation split after the last step, 0 to 1."""
    throughput_per_s: Measured | None = None
    """Units per second over the timed steps, all ranks together."""
    step_time_ms: Spread | None = None
    """Of the timed steps; the time of a step is that of its slowest rank."""
    train_time_s: Seconds | None = None
    """Sum over all parts of a resumed run; a step that was repeated counts once."""
    epoch_time_s: list[Seconds] | None = None
    """Seconds of each epoch."""
    peak_memory_bytes: dict[str, Count] | None = None
    """Allocated, reserved (GPUs), rss, categories if measured; each is the largest value of any rank."""
    parameters: Count | None = None
    """Number of parameters of the model."""
    flops_per_unit: Measured | None = None
    """Forward and backward, by the workload's formula."""
    same_work: SameWork | None = None
    """Result of the same-work proof."""
    communication_bytes: dict[str, Measured] | None = None
    """Bytes that all ranks send in one step; see SameWork."""
    data: dict[str, Any] = {}
    """The data set: name, sha256, synthetic."""
    instruments: dict[str, dict[str, Any]] = {}
    """By name of the instrument: its results, cost_s between steps, watched_steps."""
    knobs: dict[str, dict[str, Any]] = {}
    """Asked: the options of the cell; effective: the settings that were used."""
    versions: dict[str, str] = {}
    """Name of a package -> its version, on rank 0."""
    gpus: list[str] | None = None
    """NVML's UUIDs of the GPUs that ranks trained on; None: an older version wrote the file."""

    def __post_init__(self) -> None:
        check_numbers([self.data, self.instruments, self.knobs])

    @property
    def resumed(self) -> bool:
        """Whether the run resumed from a checkpoint, so that it did not train all the time from its first to its last step."""
        return self.resumed_from_step is not None


T = TypeVar("T")


class RecordLines(msgspec.Struct, Generic[T]):
    """The records of one file, and how much of the file could not be read."""

    records: list[T]
    is_truncated: bool = False
    """The last line is incomplete: the writer was killed, or is writing this line now."""
    corrupt: int = 0
    """Number of complete lines that are not a valid record of this type."""


def read_records(path: Path | str, record_type: type[T]) -> RecordLines[T]:
    """Read a record file. An incomplete last line or an invalid line does not stop the reading; RecordLines reports it.

    record_type: the type of the records. A file that does not exist has no records. Raises WorkspaceError if the file cannot be
    read."""
    try:
        file_bytes = files.read(path, files.MOST_RECORDS)
    except FileNotFoundError:
        return RecordLines([])
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    return decode_records(file_bytes, record_type)


def decode_records(raw: bytes, record_type: type[T]) -> RecordLines[T]:
    """As `read_records`, for the content of a record file, or for a part of the content that begins at the start of a line."""
    line_decoder = get_decoder(record_type)
    try:
        # Decoding all lines in one call is several times as fast as line by line. Both give the same records if each line is
        # one whole JSON object, which the condition below checks.
        records = line_decoder.decode_lines(raw)
        if len(records) == raw.count(b"\n") and raw[:1] == b"{" and raw[-2:] == b"}\n" and not _NO_OBJECT.search(raw):
            return RecordLines(records)
    except DECODE_FAULTS:
        pass
    record_lines = RecordLines[T]([])
    line_parts = raw.split(b"\n")
    last_part = line_parts.pop()
    for line_part in line_parts:
        try:
            record_lines.records.append(line_decoder.decode(line_part))
        except DECODE_FAULTS:
            record_lines.corrupt += 1
    if last_part:
        try:
            record_lines.records.append(line_decoder.decode(last_part))
        except DECODE_FAULTS:
            record_lines.is_truncated = True
    return record_lines


def find_damaged_line(path: Path | str, record_type: type[Record]) -> tuple[int, str] | None:
    """Find the first line of a file that is not a valid record: (its number from 1, the reason). None: all are valid.

    A line that a killed writer left incomplete does not count as damage, because such a line is expected: the next writer
    starts a new line after it. record_type: the type of the records.
    """
    line_decoder = msgspec.json.Decoder(record_type)
    for line_number, line in enumerate(files.read(path, files.MOST_RECORDS).split(b"\n")[:-1], start=1):
        try:
            line_decoder.decode(line)
        except DECODE_FAULTS as error:
            if line and not (line.startswith(b"{") and str(error) == _TRUNCATED_MESSAGE):
                return line_number, "its values are nested too deeply" if isinstance(error, RecursionError) else str(error)
    return None


class LineWriter:
    """Appends records to a file. Each record is one write, so that a killed writer leaves at most the last line incomplete."""

    def __init__(self, path: Path) -> None:
        self._encoder, self._record_path = msgspec.json.Encoder(), path
        try:
            try:
                self._descriptor = files.open_append_descriptor(path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = files.open_append_descriptor(path)
            if (file_size := os.fstat(self._descriptor).st_size) and os.pread(self._descriptor, 1, file_size - 1) != b"\n":
                # An earlier writer left its last line incomplete. End this line, so that the next record starts a new line.
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "write") from error

    def write_record(self, record: Record, *, sync: bool = False) -> None:
        """Append one record to the file. sync: whether to wait until the record is on the disk. Raises WorkspaceError."""
        json_line = self._encoder.encode(record) + b"\n"
        try:
            written_bytes = os.write(self._descriptor, json_line)
            if written_bytes < len(json_line):  # the disk is full: the second write raises an OSError with this reason
                os.write(self._descriptor, json_line[written_bytes:])
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            error.filename = str(self._record_path)
            raise WorkspaceError.from_os_error(error, "write") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
