"""Finds the network interface of each host that carried the traffic of a run, and whether RDMA was used."""

from __future__ import annotations

import msgspec

from collect.loading.loaded_run import LoadedRun
from collect.metrics.network import measure_counter_growth
from shardlab.hardware.nccl_log import NcclTransports


class HostTraffic(msgspec.Struct):
    """The interface of a host with the most traffic while steps were timed. The traffic of all programs counts."""

    host: str
    interface: str
    """Name of the interface."""
    kind: str
    """Loopback, physical or virtual."""
    sent_bytes: float
    """Bytes sent while steps were timed."""
    received_bytes: float
    """Bytes received while steps were timed."""
    share_pct: float
    """Share of the interface in the traffic of all interfaces of the host, including loopback."""


class RunTraffic(msgspec.Struct):
    """How the ranks of a run were connected."""

    run: str
    backend: str
    """Backend of the process group."""
    hosts: list[HostTraffic]
    """One per host of the run."""
    rdma: bool | None
    """Whether RDMA was used; None: not known."""
    why: str
    """The source of the value of `rdma`, or why it is not known."""
    nccl: NcclTransports | None = None
    """The transports that NCCL logged; None for other backends."""


def measure_run_traffic(run: LoadedRun) -> RunTraffic | None:
    """The traffic of a completed run.

    None if the run did not complete or has no process group. Also None if the run has only one rank, which sends nothing.
    """
    if not run.completed or not run.backend or run.cell.gpus == 1:
        return None
    busiest_interfaces = _find_busiest_interfaces(run)
    if run.backend != "nccl":
        return RunTraffic(run.run_id, run.backend, busiest_interfaces, rdma=False, why=f"{run.backend} sends over TCP")
    transports = run.nccl_transports
    if transports.rdma is None:
        why = "the ranks' logs do not have NCCL's lines about its connections (NCCL_DEBUG=INFO)"
    else:
        why = "NCCL's log: " + ", ".join(f"{name} ({count} connections)" for name, count in sorted(transports.channels.items()))
    return RunTraffic(run.run_id, run.backend, busiest_interfaces, transports.rdma, why, transports)


def _find_busiest_interfaces(run: LoadedRun) -> list[HostTraffic]:
    """The busiest interface of each host. A host is left out if the traffic of any of its interfaces is unknown."""
    if run.timed_window is None or run.clock_stepped:
        return []
    received_counters = run.interface_rows.get_counters("rx_bytes")
    interfaces_by_host: dict[str, list[tuple[str, str, float | None, float | None]]] = {}
    for (host, kind, nic), sent_counter in run.interfaces.items():
        sent_bytes = measure_counter_growth(sent_counter, run.timed_window)
        received_bytes = measure_counter_growth(received_counters[host, kind, nic], run.timed_window)
        interfaces_by_host.setdefault(host, []).append((nic, kind, sent_bytes, received_bytes))
    busiest_interfaces = []
    for host, interfaces in interfaces_by_host.items():
        known_interfaces = [
            (nic, kind, sent_bytes, received_bytes)
            for nic, kind, sent_bytes, received_bytes in interfaces
            if sent_bytes is not None and received_bytes is not None
        ]
        total_bytes = sum(sent_bytes + received_bytes for _, _, sent_bytes, received_bytes in known_interfaces)
        if len(known_interfaces) == len(interfaces) and total_bytes > 0:
            nic, kind, sent_bytes, received_bytes = max(known_interfaces, key=lambda interface: interface[2] + interface[3])
            share_pct = 100 * (sent_bytes + received_bytes) / total_bytes
            busiest_interfaces.append(HostTraffic(host, nic, kind, sent_bytes, received_bytes, share_pct))
    return busiest_interfaces
