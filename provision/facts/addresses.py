"""The IPv4 addresses of a machine, by network interface."""

from __future__ import annotations

from provision.fact import Fact, decode

# IPv4 alone: it is what ranks meet on, and a temporary IPv6 address would make every day's inventory another one.
PROGRAM = """\
import json, psutil, socket
found = {
    nic: [entry.address for entry in entries if entry.family == socket.AF_INET]
    for nic, entries in psutil.net_if_addrs().items()
}
print(json.dumps(found))
"""


def command(python: str) -> list[str]:
    """Needs psutil on the node, which our environment has."""
    return [python, "-c", PROGRAM]


def parse(stdout: str) -> dict[str, list[str]]:
    """Interface to addresses, sorted, without loopback and without interfaces that have none. Raises ValueError."""
    addresses_of = decode(stdout, dict[str, list[str]])
    routable = {nic: [a for a in addresses if not a.startswith("127.")] for nic, addresses in addresses_of.items()}
    return {nic: sorted(routable[nic]) for nic in sorted(routable) if routable[nic]}


ADDRESSES = Fact("addresses", command, parse, timeout_s=30)
