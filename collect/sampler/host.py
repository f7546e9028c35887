"""Processors, memory and disks from /proc, whose formats are those of proc(5) and the kernel's admin-guide/iostats."""

from __future__ import annotations

from pathlib import Path

from collect.sampler.source import KernelFile, Source
from shardlab.record import Sample

SECTOR_BYTES = 512  # the unit of /proc/diskstats, whatever the disk's own sector is
KIB = 1024


class HostSource(Source):
    """cpu_pct, memory_*_bytes and disk_*_bytes of this machine."""

    def __init__(self, proc: Path = Path("/proc"), sys_block: Path = Path("/sys/block")) -> None:
        super().__init__()
        self._before: tuple[int, int] | None = None
        self._disks = physical_disks(sys_block)
        self._files: dict[str, KernelFile] = {}
        for name in ("stat", "meminfo", "diskstats"):
            try:
                self._files[name] = KernelFile(proc / name)
            except OSError:
                self.failures[name] += 1

    def fill(self, sample: Sample) -> None:
        """Set the fields of processors, memory and disks."""
        for name, file in self._files.items():
            try:
                text = file.read()
                if name == "stat":
                    self._processors(sample, text)
                elif name == "meminfo":
                    sample.memory_used_bytes, sample.memory_total_bytes = memory(text)
                else:
                    sample.disk_read_bytes, sample.disk_write_bytes = disk_bytes(text, self._disks)
            except (OSError, ValueError, KeyError, IndexError):
                self.failures[name] += 1

    def _processors(self, sample: Sample, text: bytes) -> None:
        busy, total = processor_ticks(text)
        if self._before is not None and total > self._before[1]:
            share = 100 * (busy - self._before[0]) / (total - self._before[1])
            sample.cpu_pct = round(min(max(share, 0.0), 100.0), 2)  # iowait may go backwards by a tick, see proc(5)
        self._before = (busy, total)


def processor_ticks(stat: bytes) -> tuple[int, int]:
    """(busy, total) clock ticks of all processors since boot; idle and iowait are not busy, guest is within user."""
    fields = [int(field) for field in stat.split(b"\n", 1)[0].split()[1:9]]
    total = sum(fields)
    return total - fields[3] - fields[4], total


def memory(meminfo: bytes) -> tuple[int, int]:
    """(used, total) bytes; used is what is not available to a new program without swapping."""
    fields = dict(line.split(b":", 1) for line in meminfo.splitlines() if b":" in line)
    total, available = (int(fields[key].split()[0]) * KIB for key in (b"MemTotal", b"MemAvailable"))
    return total - available, total


def physical_disks(sys_block: Path) -> frozenset[bytes]:
    """The disks that have a device: partitions, loops and mapped volumes would count the same bytes again."""
    try:
        return frozenset(entry.name.encode() for entry in sys_block.iterdir() if (entry / "device").exists())
    except OSError:
        return frozenset()


def disk_bytes(diskstats: bytes, disks: frozenset[bytes]) -> tuple[int | None, int | None]:
    """(read, written) bytes of these disks since boot; None without any disk."""
    rows = [fields for line in diskstats.splitlines() if (fields := line.split())[2] in disks]
    if not rows:
        return None, None
    return sum(int(row[5]) for row in rows) * SECTOR_BYTES, sum(int(row[9]) for row in rows) * SECTOR_BYTES
