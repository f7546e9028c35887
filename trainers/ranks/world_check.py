"""Checks, after the rendezvous, that the ranks are on the expected number of machines and do not connect over a loopback."""

from __future__ import annotations

import hashlib
import ipaddress
import math
from socket import gethostname
from typing import TYPE_CHECKING

import psutil

from shardlab.errors import InputError

if TYPE_CHECKING:
    from shardlab.runs.run import Run
    from shardlab.runs.rundir import RunDir
    from trainers.ranks.ranks import Ranks


def check_world(run: Run, run_dir: RunDir, ranks: Ranks) -> None:
    """Check the machines and the network interfaces of all ranks. A collective, called after the rendezvous.

    Rank 0 writes the event `met` (all ranks have found each other) before the check, which may fail. Raises InputError on all
    ranks if the ranks are not on as many machines as run.json says, or if ranks on several machines are connected only over a
    loopback interface.
    """
    outside_interfaces, loopback_interfaces = find_interfaces()
    uses_outside = math.nan if not (outside_interfaces or loopback_interfaces) else float(bool(outside_interfaces))
    numbers_by_rank = ranks.all_gather_numbers([float(hash_host_name(gethostname())), uses_outside])
    host_count, nnodes = len(set(numbers_by_rank[:, 0])), run.world.nnodes
    if ranks.rank == 0:
        run_dir.write_event(
            f"rank-{ranks.rank:05d}", "met", sync=False,
            world_size=ranks.world_size, hosts=host_count, backend=ranks.backend,
            interface=", ".join(outside_interfaces or loopback_interfaces) or None,
        )  # fmt: skip
    if host_count != nnodes:
        raise InputError(
            f"{run_dir.path}: its ranks are on {host_count} machine(s), counted by host name. "
            f"Allowed: {nnodes}, as run.json says "
            "(world.nnodes)."
        )
    known_values = {row for row in numbers_by_rank[:, 1] if not math.isnan(row)}
    if nnodes > 1 and known_values == {0.0}:
        raise InputError(
            f"{run_dir.path}: its ranks connected over a loopback interface ({', '.join(loopback_interfaces)}). "
            "Allowed: an interface "
            "that reaches other machines, because world.nnodes is above 1."
        )


def find_interfaces() -> tuple[list[str], list[str]]:
    """The network interfaces that this process's TCP connections use: (interfaces that reach other machines, loopback
    interfaces). They are found by the local addresses of the sockets."""
    interface_by_address = {
        entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries
    }
    other_interfaces: set[str] = set()
    loopback_interfaces: set[str] = set()
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            address = _parse_address(connection.laddr.ip)
            (loopback_interfaces if address.is_loopback else other_interfaces).add(
                interface_by_address.get(str(address), str(address))
            )
    return sorted(other_interfaces), sorted(loopback_interfaces)


def hash_host_name(host_name: str) -> int:
    """A part of the hash of a host's name, as a number that float64 represents exactly: collectives exchange only numbers."""
    return int.from_bytes(hashlib.sha256(host_name.encode()).digest()[:6])


def _parse_address(ip_text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address of a socket. An IPv4 address that is mapped into IPv6 is returned as IPv4."""
    address = ipaddress.ip_address(ip_text.partition("%")[0])
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address
