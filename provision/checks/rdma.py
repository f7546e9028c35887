"""RDMA that is there is up: NCCL takes a link that is down for none, says so in its log alone, and trains over TCP."""

from __future__ import annotations

from provision.checks import Check, Outcome
from provision.facts.addresses import ADDRESSES
from provision.facts.rdma import RDMA, Link
from provision.facts.system import SYSTEM
from provision.operations import Site, Target

ROUTED = "RoCE v2"  # the GID type that crosses a router, and the one that NCCL takes


def run(site: Site, target: Target) -> Outcome:
    if target.facts[SYSTEM].is_container:
        return Outcome(None, "its network is that of the machine that carries it")
    links = target.facts[RDMA]
    if not links:
        return Outcome(None, "it has no RDMA card")
    nics = [nic for nic, addresses in target.facts[ADDRESSES].items() if target.node.host in addresses]
    return judge(links, nics[0] if nics else None)


def judge(links: list[Link], nic: str | None) -> Outcome:
    """Passed where a link is up, and the one of the interface that ranks meet on is, if it is one; a spare one may be down."""
    told = ", ".join(f"{link.name} ({link.nic or link.layer}) is {link.state}" for link in links)
    up = [link for link in links if link.state == "ACTIVE"]
    if any(link.nic is not None and link.nic == nic and link not in up for link in links):
        return Outcome(False, told, f"is the cable of {nic} in, and its port of the switch up? rdma link; ip link show {nic}")
    if any(link.state in ("INIT", "ARMED") for link in links):
        return Outcome(False, told, "no subnet manager has set the link up: start opensm on one node, or in the switch")
    if not up:
        return Outcome(False, told, "is a cable in? where RDMA is not wanted, unload its module: rdma link names the device")
    unrouted = [link.name for link in up if link.layer == "Ethernet" and ROUTED not in link.gids]
    if unrouted:
        return Outcome(False, f"{told}; {', '.join(unrouted)} has no GID of {ROUTED}", "give its interface an address: ip addr")
    return Outcome(True, told, measured={"links_active": len(up)})


RDMA_UP = Check("rdma", run)
