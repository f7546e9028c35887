"""Samples the counters of every network interface and of every port of RDMA devices.

The counters of the kernel are read from sysfs, the counters of the network driver from its ethtool statistics, and the counters
of RDMA from /sys/class/infiniband. The loopback interface is sampled too, because ranks on one machine communicate through it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from collect.sampler.ethtool import DriverCounters
from collect.sampler.source import KernelFile, TelemetrySource
from shardlab.hardware import host
from shardlab.runs.record import NicSample, RdmaSample, Sample

KERNEL_COUNTERS = (
    *("rx_bytes", "tx_bytes", "rx_packets", "tx_packets"),
    *("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
)
# Field of RdmaSample -> (name of the counter in sysfs, bytes or events per count). The counters port_*_data count words of four
# bytes (see the ABI document sysfs-class-infiniband of the kernel).
RDMA_COUNTERS = {
    "rx_bytes": ("port_rcv_data", 4),
    "tx_bytes": ("port_xmit_data", 4),
    "wait": ("port_xmit_wait", 1),
    "rx_errors": ("port_rcv_errors", 1),
    "tx_discards": ("port_xmit_discards", 1),
    "link_downed": ("link_downed", 1),
}
# The same for the counters in the folder hw_counters of a port, whose names each driver chooses. These are those of EFA, which
# has no counters in the other folder; it counts bytes.
DRIVER_RDMA_COUNTERS = {
    "rx_bytes": ("rx_bytes", 1),
    "tx_bytes": ("tx_bytes", 1),
    "rx_drops": ("rx_drops", 1),
    "read_bytes": ("rdma_read_bytes", 1),
    "write_bytes": ("rdma_write_bytes", 1),
    "retransmitted_bytes": ("retrans_bytes", 1),
    "retransmitted_packets": ("retrans_pkts", 1),
    "retransmission_timeouts": ("retrans_timeout_events", 1),
}
# A counter of 32 bits stops at its greatest value, so this value is not recorded.
SATURATED_COUNT = 0xFFFFFFFF


class SampledNic(msgspec.Struct):
    """A network interface whose counters are open for reading."""

    nic: host.Nic
    counters: dict[str, KernelFile]
    """{name of a counter of the kernel: its open file}."""
    driver_counters: DriverCounters | None = None
    """The counters of the driver; None if the driver has no counter that is recorded."""

    def close(self) -> None:
        """Close all counters."""
        for file in self.counters.values():
            file.close()
        if self.driver_counters is not None:
            self.driver_counters.close()


class NicSource(TelemetrySource):
    """Samples the counters of all network interfaces. Interfaces may appear and disappear between two samples."""

    def __init__(self, net_folder: Path = Path("/sys/class/net")) -> None:
        super().__init__()
        self._net_folder = net_folder
        self._sampled_nics: dict[str, SampledNic] = {}
        self._listed_names: frozenset[str] = frozenset()

    def fill(self, sample: Sample) -> None:
        """Set the field `nics` of the sample: one entry per interface whose counters could be read."""
        try:
            self._update_interfaces()
        except OSError:
            self.failures["nics"] += 1
            return
        nic_samples = [nic_sample for name in list(self._sampled_nics) if (nic_sample := self._read_nic(name)) is not None]
        sample.nics = nic_samples or None

    def _update_interfaces(self) -> None:
        """Open the counters of new interfaces, and close the counters of interfaces that disappeared."""
        listed_names = frozenset(os.listdir(self._net_folder))  # noqa: PTH208 - faster than a Path for each name, and it runs for each sample
        if listed_names == self._listed_names:
            return
        self._listed_names = listed_names
        present_nics = {nic.name: nic for nic in host.list_nics(self._net_folder)}
        for name in sorted(self._sampled_nics.keys() - present_nics.keys()):
            self._sampled_nics.pop(name).close()
        for name in sorted(present_nics.keys() - self._sampled_nics.keys()):
            counters = open_counter_files(self._net_folder / name / "statistics", KERNEL_COUNTERS)
            if not {"rx_bytes", "tx_bytes"} & counters.keys():
                self.failures[name] += 1
                continue
            self._sampled_nics[name] = SampledNic(present_nics[name], counters, self._open_driver_counters(present_nics[name]))

    def _open_driver_counters(self, nic: host.Nic) -> DriverCounters | None:
        """None if the driver has no counter that is recorded, and for the loopback interface, which has no driver."""
        if nic.kind == "loopback":
            return None
        try:
            driver_counters = DriverCounters(nic.name)
            if driver_counters.read():
                return driver_counters
        except (OSError, ValueError):
            return None
        driver_counters.close()
        return None

    def _read_nic(self, nic_name: str) -> NicSample | None:
        sampled_nic = self._sampled_nics[nic_name]
        try:
            values = {counter_name: int(counter_file.read()) for counter_name, counter_file in sampled_nic.counters.items()}
            if sampled_nic.driver_counters is not None:
                values |= sampled_nic.driver_counters.read()
        except (OSError, ValueError):  # e.g. the interface was removed (ENODEV); if it appears again, its counters are opened
            self.failures[nic_name] += 1
            self._sampled_nics.pop(nic_name).close()
            self._listed_names = frozenset()
            return None
        nic = sampled_nic.nic
        return NicSample(name=nic.name, kind=nic.kind, mac=nic.mac, pci=nic.pci, **values)


class RdmaPort(msgspec.Struct):
    """A port of an RDMA device, with its counters open for reading."""

    device: str
    port: int
    link_layer: str | None
    """Such as "InfiniBand" or "Ethernet"; None if not known."""
    pci: str | None
    """The PCI address of the device; None if not known."""
    counters: dict[str, tuple[str, KernelFile, int]]
    """{field of RdmaSample: (name of its counter in sysfs, its open file, bytes or events per count)}."""


class RdmaSource(TelemetrySource):
    """Samples the counters of all ports of the RDMA devices that exist when the sampler starts."""

    def __init__(self, infiniband_folder: Path = Path("/sys/class/infiniband")) -> None:
        super().__init__()
        self._ports = [
            RdmaPort(
                port_folder.parents[1].name,
                int(port_folder.name),
                host.read_kernel_text(port_folder / "link_layer"),
                device_link.resolve().name if (device_link := port_folder.parents[1] / "device").exists() else None,
                _open_port_counters(port_folder),
            )
            for port_folder in sorted(infiniband_folder.glob("*/ports/*"))
            if port_folder.name.isdecimal()
        ]
        self.remarks += [
            f"the RDMA port {port.device}/{port.port} has no counter that shardlab knows, so its traffic is not measured"
            for port in self._ports
            if not port.counters
        ]

    def fill(self, sample: Sample) -> None:
        """Set the field `rdma` of the sample: one entry per port. A port without known counters has an entry without values,
        so that the report can say that its traffic is not measured."""
        sample.rdma = [self._read_port(port) for port in self._ports] or None

    def _read_port(self, port: RdmaPort) -> RdmaSample:
        rdma_sample = RdmaSample(device=port.device, port=port.port, link_layer=port.link_layer, pci=port.pci)
        for sample_field, (counter_name, counter_file, count_factor) in port.counters.items():
            try:
                counter_value = int(counter_file.read())
            except (OSError, ValueError):
                self.failures[f"{port.device} {counter_name}"] += 1
                continue
            if counter_value != SATURATED_COUNT:
                setattr(rdma_sample, sample_field, counter_value * count_factor)
        return rdma_sample


def _open_port_counters(port_folder: Path) -> dict[str, tuple[str, KernelFile, int]]:
    """The open counters of a port, as in `RdmaPort`. If both folders have a counter of a field, that of the kernel is used."""
    port_counters: dict[str, tuple[str, KernelFile, int]] = {}
    for folder_name, known_counters in (("hw_counters", DRIVER_RDMA_COUNTERS), ("counters", RDMA_COUNTERS)):
        open_files = open_counter_files(port_folder / folder_name, [name for name, _ in known_counters.values()])
        for sample_field, (name, count_factor) in known_counters.items():
            if name in open_files:
                port_counters[sample_field] = (name, open_files[name], count_factor)
    return port_counters


def open_counter_files(folder: Path, counter_names: tuple[str, ...] | list[str]) -> dict[str, KernelFile]:
    """Open files in a folder of sysfs. Returns {counter_name: open file}, without files that cannot be opened."""
    file_by_counter = {}
    for counter_name in counter_names:
        try:
            file_by_counter[counter_name] = KernelFile(folder / counter_name)
        except OSError:
            continue
    return file_by_counter
