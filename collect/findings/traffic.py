"""Finds the network interface of each host that carried the traffic of a run, and whether RDMA was used."""

from __future__ import annotations

import msgspec

from collect.loading.loaded_run import LoadedRun
from collect.metrics.network import counter_growth
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


def measure_traffic(run: LoadedRun) -> RunTraffic | None:
    """The traffic of a completed run.

    None if the run did not complete or has no process group. Also None if the run has only one rank, which sends nothing.
    """
    if not run.completed or not run.backend or run.cell.gpus == 1:
        return None
    hosts = _busiest_interfaces(run)
    if run.backend != "nccl":
        return RunTraffic(run.run_id, run.backend, hosts, rdma=False, why=f"{run.backend} sends over TCP")
    transports = run.nccl_transports
    if transports.rdma is None:
        why = "the ranks' logs do not have NCCL's lines about its connections (NCCL_DEBUG=INFO)"
    else:
        why = "NCCL's log: " + ", ".join(f"{name} ({count} connections)" for name, count in sorted(transports.channels.items()))
    return RunTraffic(run.run_id, run.backend, hosts, transports.rdma, why, transports)


def _busiest_interfaces(run: LoadedRun) -> list[HostTraffic]:
    """The busiest interface of each host. A host is left out if the traffic of any of its interfaces is unknown."""
    if run.window is None or run.clock_stepped:
        return []
    received = run.interface_rows.counters("rx_bytes")
    entries_by_host: dict[str, list[tuple[str, str, float | None, float | None]]] = {}
    for (host, kind, name), counter in run.interfaces.items():
        sent, received_bytes = (counter_growth(counter, run.window), counter_growth(received[host, kind, name], run.window))
        entries_by_host.setdefault(host, []).append((name, kind, sent, received_bytes))
    host_traffic = []
    for host, entries in entries_by_host.items():
        known_entries = [
            (name, kind, sent, received_bytes)
            for name, kind, sent, received_bytes in entries
            if sent is not None and received_bytes is not None
        ]
        total = sum(sent + received_bytes for _, _, sent, received_bytes in known_entries)
        if len(known_entries) == len(entries) and total > 0:
            name, kind, sent, received_bytes = max(known_entries, key=lambda entry: entry[2] + entry[3])
            host_traffic.append(HostTraffic(host, name, kind, sent, received_bytes, 100 * (sent + received_bytes) / total))
    return host_traffic
