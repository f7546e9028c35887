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


def judge_interfaces(node_entry: NodeEntry, nics: list[Nic], addresses_by_nic: dict[str, list[str]]) -> Outcome:
    """Returns a passed Outcome if the interfaces of the node have the addresses that the manifest states.

    node_entry: the node in the manifest. nics: the interfaces that the node reports. addresses_by_nic: their IP addresses, by interface.
    """
    interfaces = experiment_interfaces.find_interfaces(nics, addresses_by_nic, node_entry.address, node_entry.control)
    experiment, control = interfaces.experiment, interfaces.control
    if node_entry.mac is not None:
        matching_nics = [nic.name for nic in nics if nic.mac == node_entry.mac]  # a VLAN has the MAC of its parent
        if not matching_nics:
            return Outcome(False, f"no interface has the MAC address {node_entry.mac} of the manifest", INTERFACE_ADVICE)
        if experiment.interface not in matching_nics:
            actual_clause = f"it is on {experiment.interface}" if experiment.interface is not None else "no interface has it"
            sentence = f"{' and '.join(matching_nics)} with the manifest's MAC address {node_entry.mac} should have {node_entry.address}, but {actual_clause}"
            return Outcome(False, sentence, INTERFACE_ADVICE)
    elif experiment.interface is None:
        return Outcome(False, f"no interface has the experiment address {node_entry.address}", INTERFACE_ADVICE)
    if control.interface is None:
        return Outcome(False, f"no interface has the control address {node_entry.control} of the manifest", INTERFACE_ADVICE)
    if control.interface == experiment.interface:
        return Outcome(
            False,
            f"{control.interface} has both the experiment address {node_entry.address} and the control address {node_entry.control}",
            INTERFACE_ADVICE,
        )
    mac_text = node_entry.mac if node_entry.mac is not None else "whose MAC address the manifest does not state"
    return Outcome(
        True,
        f"{node_entry.address} is on {experiment.interface} ({mac_text}), and the control address {node_entry.control} on {control.interface}",
    )


EXPERIMENT_NETWORK = Check("experiment_network", run)
