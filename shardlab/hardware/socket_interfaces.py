"""Which network interfaces NCCL and Gloo use for TCP on this machine.

The user's or the site's choice comes first. Else NCCL gets all interfaces of the network through which the nodes reach each
other, and Gloo one of them. NCCL also uses the interfaces to set up RDMA. What applied is on record in env/HOST.json of a run.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from shardlab.files import files

NCCL_VARIABLE, GLOO_VARIABLE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
SITE_FILE = Path("/etc/nccl.conf")  # NCCL reads this file and the user's; a variable of the environment replaces their lines
MOST_BYTES = 1 << 20


def choose_socket_interfaces(rank_variables: Mapping[str, str], interface: str) -> dict[str, str]:
    """The variables that tell NCCL and Gloo their interfaces. A variable that the user or the site has set is left out.

    rank_variables: the variables of the ranks. interface: the interface through which this node reaches the other nodes.
    """
    # "=" means exactly these names; without "=", NCCL takes each name as a prefix. Gloo gets one interface: it hangs if the
    # nodes do not have the same number of interfaces, for example because a link is down.
    value_by_variable = {GLOO_VARIABLE: interface, NCCL_VARIABLE: f"={','.join(list_network_interfaces(interface))}"}
    is_set_by_variable = {
        GLOO_VARIABLE: bool(rank_variables.get(GLOO_VARIABLE)),
        NCCL_VARIABLE: bool(rank_variables.get(NCCL_VARIABLE)) or _is_in_nccl_files(rank_variables),
    }
    return {name: value for name, value in value_by_variable.items() if not is_set_by_variable[name]}


def list_network_interfaces(interface: str) -> list[str]:
    """The interface, and the other interfaces of the same IP network that are up and at least as fast, sorted by name.

    A node of a fast network may have several, such as hsn0 to hsn3. An interface of another network is never named: it may be
    a control network, which must carry no data.
    """
    addresses_by_interface, state_by_interface = psutil.net_if_addrs(), psutil.net_if_stats()
    own_networks = {_find_network(entry.address, entry.netmask) for entry in addresses_by_interface.get(interface, ())} - {None}
    own_speed_mbps = state_by_interface[interface].speed if interface in state_by_interface else 0  # Mbit/s; 0: not known
    other_interfaces = [
        name
        for name, address_entries in addresses_by_interface.items()
        if name != interface
        and (state := state_by_interface.get(name)) is not None
        and state.isup
        and state.speed >= own_speed_mbps
        and any(_find_network(entry.address, entry.netmask) in own_networks for entry in address_entries)
    ]
    return sorted([interface, *other_interfaces])


def _find_network(address: str, netmask: str | None) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The IP network of an address; None for a loopback or link-local address, a single address and a MAC address."""
    try:
        ip_address = ipaddress.ip_address(address.partition("%")[0])
        prefix_length = bin(int(ipaddress.ip_address(netmask or ""))).count("1")
    except ValueError:
        return None
    ip_network = ipaddress.ip_network(f"{ip_address}/{prefix_length}", strict=False)
    return None if ip_address.is_loopback or ip_address.is_link_local or ip_network.num_addresses == 1 else ip_network


def _is_in_nccl_files(rank_variables: Mapping[str, str]) -> bool:
    """Whether the site's or the user's file of NCCL names the interfaces."""
    user_file = rank_variables.get("NCCL_CONF_FILE") or f"{rank_variables.get('HOME', '')}/.nccl.conf"
    for path in (Path(user_file), SITE_FILE):
        try:
            with files.open_regular(path) as settings_file:
                if re.search(rb"(?m)^\s*NCCL_SOCKET_IFNAME\s*=", settings_file.read(MOST_BYTES)):
                    return True
        except OSError:
            continue
    return False
