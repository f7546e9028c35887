"""Checks the networks of a CloudLab node: the interface whose MAC address is in the experiment's manifest must have the address
on the experiment network, and not the address on the control network."""

from __future__ import annotations

from provision.check import Check, Outcome
from provision.cloudlab import experiment_interfaces
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.operation import Site, Target
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.hardware.host import Nic

INTERFACE_ADVICE = (
    "is the manifest of this experiment the present one (geni-get manifest on the node)? If it is, the node's network is not "
    "set up: ip addr shows it, and a reboot of the node at the portal sets it up again"
)


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if the node has its experiment address and its control address on the interfaces that the
    manifest names.

    Raises Unanswered.
    """
    if target.node_entry is None or target.node_entry.control is None:
        return Outcome(None, "the manifest names no control address for it")
    if target.node_entry.address == target.node_entry.control:
        if len(site.targets) == 1:
            return Outcome(None, "the experiment has one node and no experiment network")
        return Outcome(
            False,
            f"{target.node_entry.address}, on which the nodes would train, is its address on the control network",
            "remove `nodes` from the cluster file, so that they are taken from the manifest",
        )
    return judge_interfaces(target.node_entry, target.facts[HOST].nics, target.facts[ADDRESSES])


def judge_interfaces(node: NodeEntry, nics: list[Nic], addresses_by_nic: dict[str, list[str]]) -> Outcome:
    """Returns a passed Outcome if the interfaces of the node have the addresses that the manifest states.

    node: the node in the manifest. nics: the interfaces that the node reports. addresses_by_nic: their IP addresses, by
    interface.
    """
    interfaces = experiment_interfaces.find_interfaces(nics, addresses_by_nic, node.address, node.control)
    experiment, control = interfaces.experiment, interfaces.control
    if node.mac is not None:
        names = [nic.name for nic in nics if nic.mac == node.mac]  # a VLAN has the MAC of its parent
        if not names:
            return Outcome(False, f"no interface has the MAC address {node.mac} of the manifest", INTERFACE_ADVICE)
        if experiment.interface not in names:
            actual = f"it is on {experiment.interface}" if experiment.interface is not None else "no interface has it"
            text = f"{' and '.join(names)} with the manifest's MAC address {node.mac} should have {node.address}, but {actual}"
            return Outcome(False, text, INTERFACE_ADVICE)
    elif experiment.interface is None:
        return Outcome(False, f"no interface has the experiment address {node.address}", INTERFACE_ADVICE)
    if control.interface is None:
        return Outcome(False, f"no interface has the control address {node.control} of the manifest", INTERFACE_ADVICE)
    if control.interface == experiment.interface:
        return Outcome(
            False,
            f"{control.interface} has both the experiment address {node.address} and the control address {node.control}",
            INTERFACE_ADVICE,
        )
    mac = node.mac if node.mac is not None else "whose MAC address the manifest does not state"
    return Outcome(
        True,
        f"{node.address} is on {experiment.interface} ({mac}), and the control address {node.control} on {control.interface}",
    )


EXPERIMENT_NETWORK = Check("experiment_network", run)
