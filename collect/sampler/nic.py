"""Byte counters of every network interface from sysfs, loopback too: ranks on one machine talk through it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from collect.sampler.source import KernelFile, Source
from shardlab import host
from shardlab.record import NicSample, Sample

COUNTERS = ("rx_bytes", "tx_bytes")


class OpenNic(msgspec.Struct):
    """An interface and its counters, opened."""

    nic: host.Nic
    counters: dict[str, KernelFile]

    def close(self) -> None:
        """Close the files of all counters."""
        for file in self.counters.values():
            file.close()


class NicSource(Source):
    """The counters of all interfaces; interfaces may come and go between ticks."""

    def __init__(self, root: Path = Path("/sys/class/net")) -> None:
        super().__init__()
        self._root = root
        self._open: dict[str, OpenNic] = {}
        self._listed: frozenset[str] = frozenset()

    def fill(self, sample: Sample) -> None:
        """Set `nics`: one entry per interface whose counters could be read."""
        try:
            self._follow()
        except OSError:
            self.failures["nics"] += 1
            return
        read = [found for name in list(self._open) if (found := self._read(name)) is not None]
        sample.nics = read or None

    def _follow(self) -> None:
        """Open what is new, close what is gone."""
        listed = frozenset(os.listdir(self._root))  # noqa: PTH208 - at every tick: names are enough
        if listed == self._listed:
            return
        self._listed = listed
        now = {nic.name: nic for nic in host.nics(self._root)}
        for name in self._open.keys() - now.keys():
            self._open.pop(name).close()
        for name in now.keys() - self._open.keys():
            folder = self._root / name / "statistics"
            try:
                self._open[name] = OpenNic(now[name], {counter: KernelFile(folder / counter) for counter in COUNTERS})
            except OSError:
                self.failures[name] += 1

    def _read(self, name: str) -> NicSample | None:
        entry = self._open[name]
        try:
            values = {counter: int(file.read()) for counter, file in entry.counters.items()}
        except (OSError, ValueError):  # ENODEV: it went away, or a new one has its name; the next tick opens that
            self.failures[name] += 1
            self._open.pop(name).close()
            self._listed = frozenset()
            return None
        nic = entry.nic
        return NicSample(name=nic.name, kind=nic.kind, mac=nic.mac, pci=nic.pci, **values)
