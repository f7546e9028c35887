"""The network of practice nodes: a bridge on this machine. This machine has the last address of the subnet."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from typing import Any

from provision.practice.base import PracticeNodeError, run_here


def make_interface_name(long_name: str) -> str:
    """A unique name for a network interface, with at most 15 characters, which is the limit of Linux. long_name: a name that
    may be longer."""
    return f"sl-{hashlib.sha256(long_name.encode()).hexdigest()[:8]}"


def make_mac_address(bridge: str) -> str:
    """A locally administered MAC address for a bridge. bridge: the bridge; a name always gets the same address.

    A bridge without its own address uses the address of one of its ports, so the address of the bridge changes when this port
    is removed. Then the other nodes cannot reach this machine until they look up its MAC address again.
    """
    return ":".join(["02", *(f"{byte:02x}" for byte in hashlib.sha256(bridge.encode()).digest()[:5])])


def make_bridge_name(cluster: str) -> str:
    """The name of the bridge (a network interface of this machine) to which the practice nodes of a cluster are connected."""
    return make_interface_name(cluster)


def choose_node_address(subnet: str, node_index: int) -> str:
    """The address of a node: node 0 has the first address of the subnet. Raises PracticeNodeError if the subnet is too small.

    node_index: the place of the node in the cluster file, counted from 0.
    """
    ip_network = ipaddress.ip_network(subnet)
    if node_index + 2 >= ip_network.num_addresses - 1:
        raise PracticeNodeError(f"the subnet {subnet} is too small for {node_index + 1} nodes; set lan.subnet to a larger one.")
    return str(ip_network[node_index + 1])


def find_gateway_address(subnet: str) -> str:
    """The address of this machine on the bridge: the last address of the subnet."""
    return str(ipaddress.ip_network(subnet)[-2])


def interface_exists(interface_name: str) -> bool:
    """Whether a network interface of this name exists."""
    return any(present_link["ifname"] == interface_name for present_link in _list_links())


def make_bridge(bridge_name: str, subnet: str) -> None:
    """Make the bridge `bridge_name` if it is missing. Raises PracticeNodeError if another interface has an address in the
    subnet."""
    network = ipaddress.ip_network(subnet)
    for link in _list_links():
        for entry in link.get("addr_info", ()):
            if link["ifname"] != bridge_name and entry["family"] == "inet" and ipaddress.ip_address(entry["local"]) in network:
                raise PracticeNodeError(
                    f"{link['ifname']} already has {entry['local']} of the subnet {subnet}; set lan.subnet to another subnet."
                )
    if not interface_exists(bridge_name):
        run_here(["ip", "link", "add", bridge_name, "address", make_mac_address(bridge_name), "type", "bridge"])
    run_here(["ip", "address", "replace", f"{find_gateway_address(subnet)}/{network.prefixlen}", "dev", bridge_name])
    run_here(["ip", "link", "set", bridge_name, "up"])


def delete_bridge(bridge_name: str) -> None:
    """Delete the bridge `bridge_name` if it exists."""
    if interface_exists(bridge_name):
        run_here(["ip", "link", "delete", bridge_name])


def _list_links() -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = json.loads(run_here(["ip", "-json", "address", "show"]))
    return links
