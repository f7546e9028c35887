"""Checks that RDMA links are up. If a link is down, NCCL falls back to TCP and only logs it."""

from __future__ import annotations

from provision.check import Check, Outcome
from provision.facts.addresses import ADDRESSES
from provision.facts.rdma import RDMA, RdmaLink
from provision.facts.system import SYSTEM
from provision.operation import Site, Target

ROUTED_GID = "RoCE v2"  # the GID type that can be routed, and that NCCL uses


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if the RDMA links that the ranks use are up."""
    if target.facts[SYSTEM].is_container:
        return Outcome(None, "it is a container, which uses the network of its host")
    rdma_links = target.facts[RDMA]
    if not rdma_links:
        return Outcome(None, "it has no RDMA card")
    data_nics = [nic for nic, addresses in target.facts[ADDRESSES].items() if target.node.address in addresses]
    return judge_links(rdma_links, data_nics[0] if data_nics else None)


def judge_links(rdma_links: list[RdmaLink], nic: str | None) -> Outcome:
    """Returns a passed Outcome if at least one RDMA link is up, and no link has a fault. If the interface `nic` has an RDMA
    link, this link must be up; other links may be down.

    nic: the interface over which the ranks communicate; None: it is not known.
    """
    text = ", ".join(f"{link.name} ({link.nic or link.layer}) is {link.state}" for link in rdma_links)
    active_links = [link for link in rdma_links if link.state == "ACTIVE"]
    if any(link.nic is not None and link.nic == nic and link not in active_links for link in rdma_links):
        return Outcome(False, text, f"is the cable of {nic} plugged in, and its switch port up? rdma link; ip link show {nic}")
    if any(link.state in ("INIT", "ARMED") for link in rdma_links):
        return Outcome(False, text, "no subnet manager has set the link up: start opensm on one node, or in the switch")
    if not active_links:
        return Outcome(False, text, "is a cable plugged in? If RDMA is not wanted, unload its kernel module (see rdma link)")
    unroutable_links = [link.name for link in active_links if link.layer == "Ethernet" and ROUTED_GID not in link.gids]
    if unroutable_links:
        return Outcome(
            False, f"{text}; {', '.join(unroutable_links)} has no GID of {ROUTED_GID}", "give its interface an address: ip addr"
        )
    return Outcome(True, text, measured={"links_active": len(active_links)})


RDMA_UP = Check("rdma", run)
