"""The IPv4 addresses of a machine, by network interface."""

from __future__ import annotations

from provision.fact import FactQuery, decode_last_line

# Prints only IPv4 addresses. Ranks use IPv4 for their rendezvous; temporary IPv6 addresses would change the inventory often.
PRINT_ADDRESSES = """\
import json, psutil, socket
found = {
    nic: [entry.address for entry in entries if entry.family == socket.AF_INET]
    for nic, entries in psutil.net_if_addrs().items()
}
print(json.dumps(found))
"""


def build_command(python: str) -> list[str]:
    """The command that prints the addresses. It needs psutil on the node, which the environment of shardlab contains."""
    return [python, "-c", PRINT_ADDRESSES]


def parse(stdout: str) -> dict[str, list[str]]:
    """The sorted addresses, by interface. Loopback and interfaces without addresses are left out. Raises ValueError."""
    ips_by_nic = decode_last_line(stdout, dict[str, list[str]])
    routable_by_nic = {nic: [ip for ip in addresses if not ip.startswith("127.")] for nic, addresses in ips_by_nic.items()}
    return {nic: sorted(routable_by_nic[nic]) for nic in sorted(routable_by_nic) if routable_by_nic[nic]}


ADDRESSES = FactQuery("addresses", build_command, parse, timeout_s=30)
