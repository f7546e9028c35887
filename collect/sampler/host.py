"""Samples processors, memory, pressure stall information, disks and NFS from files in /proc.

proc(5) and the admin-guide of the kernel define the formats of these files. psutil provides most of these numbers too, but
takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from collect.sampler.source import KernelFile, TelemetrySource
from shardlab.runs.record import Sample

SECTOR_BYTES = 512  # the unit of /proc/diskstats, which does not depend on the sector size of the disk
KIB = 1024


class HostSource(TelemetrySource):
    """Fills the fields of a sample about the machine as a whole, and not about its devices."""

    def __init__(self, proc: Path = Path("/proc"), sys_block: Path = Path("/sys/block")) -> None:
        super().__init__()
        self._previous_ticks: list[tuple[int, int]] = []
        self._disk_names = list_physical_disks(sys_block)
        self._open_files: list[tuple[str, KernelFile, Callable[[Sample, bytes], None]]] = []
        fill_functions: dict[str, Callable[[Sample, bytes], None]] = {
            "stat": self._fill_processor_fields,
            "meminfo": _fill_memory_fields,
            "diskstats": self._fill_disk_fields,
            "self/mountstats": _fill_nfs_fields,
        }
        fill_functions |= {
            f"pressure/{resource}": partial(_fill_pressure_field, resource) for resource in ("cpu", "memory", "io")
        }
        for file_name, fill_fields in fill_functions.items():
            try:
                file = KernelFile(proc / file_name)
                text = file.read()  # if the kernel was started with psi=0, the files of pressure exist but cannot be read
            except OSError:
                self.unsupported[file_name] += 1
                continue
            # Without NFS mounts, mountstats contains no data, and reading it would be a quarter of the cost of each sample.
            if fill_fields is not _fill_nfs_fields or parse_nfs_bytes(text)[0] is not None:
                self._open_files.append((file_name, file, fill_fields))

    def fill(self, sample: Sample) -> None:
        """Set the fields of the sample about the machine. A field stays None if its file in /proc cannot be read."""
        for file_name, kernel_file, fill_fields in self._open_files:
            try:
                fill_fields(sample, kernel_file.read())
            except (OSError, ValueError, KeyError, IndexError):
                self.failures[file_name] += 1

    def _fill_processor_fields(self, sample: Sample, stat: bytes) -> None:
        ticks = parse_processor_ticks(stat)
        # The lengths differ if a processor went online or offline, which changes indexes.
        if len(ticks) == len(self._previous_ticks):
            busy_pcts = [_compute_busy_pct(before, after) for before, after in zip(self._previous_ticks, ticks, strict=True)]
            sample.cpu_pct = busy_pcts[0]
            if len(busy_pcts) > 1 and None not in busy_pcts:
                sample.cores_pct = [round(busy_pct, 1) for busy_pct in busy_pcts[1:] if busy_pct is not None]
        self._previous_ticks = ticks

    def _fill_disk_fields(self, sample: Sample, diskstats: bytes) -> None:
        sample.disk_read_bytes, sample.disk_write_bytes = parse_disk_bytes(diskstats, self._disk_names)


def parse_processor_ticks(stat: bytes) -> list[tuple[int, int]]:
    """The clock ticks since boot, from the content of /proc/stat, as (busy ticks, all ticks): first of all processors
    together, then of each processor.

    The columns `idle` and `iowait` do not count as busy. The column `guest` is not added: the column `user` includes it.
    """
    processor_ticks = []
    for line in stat.splitlines():
        if not line.startswith(b"cpu"):
            break
        tick_counts = [int(tick_count) for tick_count in line.split()[1:9]]
        all_ticks = sum(tick_counts)
        processor_ticks.append((all_ticks - tick_counts[3] - tick_counts[4], all_ticks))
    if not processor_ticks:
        raise ValueError("no processors")
    return processor_ticks


def _compute_busy_pct(earlier_ticks: tuple[int, int], later_ticks: tuple[int, int]) -> float | None:
    """The busy ticks between two samples, in percent; None if no tick passed. Both arguments are (busy ticks, all ticks)."""
    if later_ticks[1] <= earlier_ticks[1]:
        return None
    busy_pct = 100 * (later_ticks[0] - earlier_ticks[0]) / (later_ticks[1] - earlier_ticks[1])
    return round(min(max(busy_pct, 0.0), 100.0), 2)  # iowait may decrease by a tick (proc(5)), so it may be above 100


def _fill_memory_fields(sample: Sample, meminfo: bytes) -> None:
    sample.memory_used_bytes, sample.memory_total_bytes = parse_memory(meminfo)


def _fill_pressure_field(resource: str, sample: Sample, pressure_text: bytes) -> None:
    setattr(sample, f"{resource}_pressure_s", parse_pressure_s(pressure_text))


def _fill_nfs_fields(sample: Sample, mountstats: bytes) -> None:
    sample.nfs_read_bytes, sample.nfs_write_bytes = parse_nfs_bytes(mountstats)


def parse_pressure_s(pressure_text: bytes) -> float:
    """Seconds since boot in which a task waited for a resource, from the line `some` of a file in /proc/pressure."""
    some_line = next(line for line in pressure_text.splitlines() if line.startswith(b"some "))
    return int(some_line.rpartition(b"total=")[2]) / 1e6


def parse_nfs_bytes(mountstats: bytes) -> tuple[int | None, int | None]:
    """Returns (bytes received from NFS servers, bytes sent to NFS servers) since the NFS folders were mounted.

    (None, None) if no NFS folder is mounted. If an NFS folder is mounted at several places, its bytes count once, because the
    kernel has one counter for all its mounts. mountstats: the content of /proc/self/mountstats.
    """
    bytes_by_device: dict[bytes, tuple[int, int]] = {}
    device_name = b""
    for line in mountstats.splitlines():
        if line.startswith(b"device "):
            device_name = line.split()[1] if b" with fstype nfs" in line else b""
        elif device_name and line.startswith(b"\tbytes:"):
            line_fields = line.split()
            bytes_by_device[device_name] = int(line_fields[5]), int(line_fields[6])
    if not bytes_by_device:
        return None, None
    return sum(read for read, _ in bytes_by_device.values()), sum(sent_bytes for _, sent_bytes in bytes_by_device.values())


def parse_memory(meminfo: bytes) -> tuple[int, int]:
    """Returns (used bytes, total bytes) of the machine's memory, from the content of /proc/meminfo.

    All memory counts as used that is not available to a new program without swapping.
    """
    value_by_key = dict(line.split(b":", 1) for line in meminfo.splitlines() if b":" in line)
    total_bytes, available_bytes = (int(value_by_key[key].split()[0]) * KIB for key in (b"MemTotal", b"MemAvailable"))
    return total_bytes - available_bytes, total_bytes


def list_physical_disks(sys_block: Path) -> frozenset[bytes]:
    """The names of the disks that are hardware devices.

    Partitions, loop devices and mapped volumes are left out, because their bytes are also bytes of a hardware device.
    """
    try:
        return frozenset(disk_entry.name.encode() for disk_entry in sys_block.iterdir() if (disk_entry / "device").exists())
    except OSError:
        return frozenset()


def parse_disk_bytes(diskstats: bytes, disk_names: frozenset[bytes]) -> tuple[int | None, int | None]:
    """Returns (bytes read, bytes written) on these disks since boot.

    (None, None) if diskstats, the content of /proc/diskstats, has no line for any of these disks.
    """
    rows = [line_fields for line in diskstats.splitlines() if (line_fields := line.split())[2] in disk_names]
    if not rows:
        return None, None
    return sum(int(disk_row[5]) for disk_row in rows) * SECTOR_BYTES, sum(int(disk_row[9]) for disk_row in rows) * SECTOR_BYTES
