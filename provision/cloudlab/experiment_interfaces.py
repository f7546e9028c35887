"""The two network interfaces of a node of a CloudLab experiment: on the experiment network, and on the control network."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.operation import Target
from shardlab.hardware.host import Nic


class NodeInterface(msgspec.Struct, frozen=True):
    """An interface of a node on one of its two networks. A field is None if it is not known or does not exist."""

    address: str | None = None
    """The IPv4 address of the node on this network."""
    interface: str | None = None
    """The name that the interface with this address has on the node."""
    mac: str | None = None
    """The MAC address of this interface."""


class ExperimentInterfaces(msgspec.Struct, frozen=True):
    """The interfaces of a node on the experiment network and on the control network."""

    experiment: NodeInterface
    control: NodeInterface


def find_interface_name(addresses_by_nic: dict[str, list[str]], address: str | None) -> str | None:
    """The name of the interface that has this address; None if no interface has it. addresses_by_nic: by name of the
    interface."""
    return next((name for name, interface_addresses in addresses_by_nic.items() if address in interface_addresses), None)


def find_interfaces(
    nics: Sequence[Nic], addresses_by_nic: dict[str, list[str]], experiment_address: str | None, control_address: str | None
) -> ExperimentInterfaces:
    """The interfaces of a node that have the addresses `experiment_address` and `control_address`.

    nics: the interfaces that the node reports. addresses_by_nic: their addresses, by name of the interface.
    """
    mac_by_nic = {nic.name: nic.mac for nic in nics}

    def make_node_interface(address: str | None) -> NodeInterface:
        interface_name = find_interface_name(addresses_by_nic, address)
        return NodeInterface(address, interface_name, mac_by_nic.get(interface_name) if interface_name is not None else None)

    return ExperimentInterfaces(make_node_interface(experiment_address), make_node_interface(control_address))


def find_node_interfaces(target: Target) -> ExperimentInterfaces | None:
    """The two interfaces of a node; None if the node belongs to no CloudLab experiment.

    Raises Unanswered if the node does not report its interfaces.
    """
    node_entry = target.node_entry
    if node_entry is None or node_entry.control is None:
        return None
    return find_interfaces(target.facts[HOST].nics, target.facts[ADDRESSES], node_entry.address, node_entry.control)
