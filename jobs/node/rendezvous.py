"""The rendezvous of the ranks of a run: chooses its address, and finds the network interface through which a node reaches the
address.

If a run has several nodes, neither the address nor the interface is a loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from jobs.slurm.commands import call_slurm, read_own_cluster
from shardlab.errors import ShardlabError

RENDEZVOUS_VARIABLE, RENDEZVOUS_ID_VARIABLE = "SHARDLAB_RENDEZVOUS", "SHARDLAB_RENDEZVOUS_ID"
# possible ports of a rendezvous; Linux gives only higher ports to outgoing connections
RENDEZVOUS_PORTS = range(20_000, 30_000)
# Environment variables. NODE_VARIABLE: the number of this node in its run, from 0 (set only without Slurm). NODES_VARIABLE:
# the names or addresses of all nodes of the run, separated by commas.
NODE_VARIABLE, NODES_VARIABLE = "SHARDLAB_NODE", "SHARDLAB_NODES"
# Interfaces that connect containers and virtual machines with their own machine: docker, podman, LXC, libvirt, Kubernetes.
_CONTAINER_INTERFACE = re.compile(r"^(docker|br-[0-9a-f]{12}\Z|veth|virbr|vnet|cni|flannel|cali|podman|lxc|lxd|vb-|ve-)")
_DOCKER_BRIDGE = "172.17.0.1"  # each machine with docker has this address, for its own containers


class RendezvousError(ShardlabError):
    """Raised if a node of a run has no address at which the other nodes can reach it."""


class RendezvousInterface(msgspec.Struct, frozen=True):
    """The network interface through which this node reaches the other nodes, and the address of this node on the interface."""

    interface: str
    address: str


def choose_rendezvous(nnodes: int) -> dict[str, str]:
    """Choose the address of the rendezvous, which is on the first node of the job, and the name of the rendezvous.

    nnodes: the number of nodes of the run. Returns environment variables for the ranks: the address, the name, and the names of
    the nodes, because ranks in a container cannot ask Slurm. The port is free at this moment; if another program takes the port
    before the ranks start, the run fails with this reason. Raises RendezvousError.
    """
    # with `salloc`, this process may run on the login node, so only this list tells which node is the first node of the job
    node_names = _list_job_node_names()
    first_node_name = os.environ.get("SLURMD_NODENAME") or next(iter(node_names), socket.gethostname())
    address = "127.0.0.1" if nnodes == 1 else _resolve_first_node(first_node_name)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        try:
            listener.bind((address, 0))
            port = listener.getsockname()[1]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # the address belongs to another node, because this process runs on the machine where `salloc` was called
            port = secrets.choice(RENDEZVOUS_PORTS)
    host = f"[{address}]" if ":" in address else address
    rendezvous_id = f"{os.environ.get('SLURM_JOB_ID', 'local')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}-{port}"
    return {RENDEZVOUS_VARIABLE: f"{host}:{port}", RENDEZVOUS_ID_VARIABLE: rendezvous_id, NODES_VARIABLE: ",".join(node_names)}


def read_node_number(environment: Mapping[str, str]) -> int:
    """The number of this node in its run, from 0. environment: the variables of a task of the run."""
    return int(environment.get(NODE_VARIABLE) or environment.get("SLURM_NODEID", "0"))


def read_master_variables() -> dict[str, str]:
    """The rendezvous as the variables of torch's `env://` method, for launchers that do not set these variables themselves."""
    host, _, port = os.environ[RENDEZVOUS_VARIABLE].rpartition(":")
    return {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}


def find_rendezvous_interface(rendezvous_address: str, node_names: Sequence[str]) -> RendezvousInterface:
    """The interface through which this node reaches the rendezvous, or, on the node of the rendezvous itself, another node.

    rendezvous_address: the address of the rendezvous, as HOST:PORT. node_names: the names or addresses of all nodes of the run.
    Raises RendezvousError.
    """
    rendezvous_host = rendezvous_address.rpartition(":")[0].strip("[]")
    if ipaddress.ip_address(rendezvous_host).is_loopback:
        return RendezvousInterface("lo", rendezvous_host)
    own_interfaces = _map_interface_by_address()
    remote_address = rendezvous_host
    if rendezvous_host in own_interfaces:
        remote_address = next(
            (address for node_name in node_names if (address := _resolve_host(node_name)) and address not in own_interfaces),
            rendezvous_host,
        )
    with socket.socket(socket.AF_INET6 if ":" in remote_address else socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        # for a UDP socket, connect sends nothing: it only asks the kernel for the route
        probe_socket.connect((remote_address, 9))
        own_address = probe_socket.getsockname()[0]
    own_ip = ipaddress.ip_address(own_address)
    if own_address not in own_interfaces or own_ip.is_loopback or own_ip.is_link_local:
        this_host = socket.gethostname()
        raise RendezvousError(
            f"{this_host}: the route to {remote_address} uses the address {own_address}, which no other node can reach."
        )
    return RendezvousInterface(own_interfaces[own_address], own_address)


def _list_job_node_names() -> list[str]:
    """The names of the nodes of this Slurm job; empty outside of a job. A list such as node[1-4] is expanded by Slurm's
    scontrol; a single name needs no command."""
    node_list_text = os.environ.get("SLURM_JOB_NODELIST", "")
    if not any(list_sign in node_list_text for list_sign in "[,"):
        return [node_list_text] if node_list_text else []
    return call_slurm(["scontrol", "show", "hostnames", node_list_text]).stdout.split()


def _resolve_first_node(first_node_name: str) -> str:
    """The address at which the other nodes reach the first node: resolved from its name, or from Slurm's NodeAddr if its name
    resolves to no address that they can reach. Raises RendezvousError."""
    address = _resolve_host(first_node_name)
    if address is None or _find_address_fault(address):
        output_words = call_slurm(["scontrol", "show", "node", first_node_name], cluster=read_own_cluster()).stdout.split()
        slurm_address = next(
            (output_word.partition("=")[2] for output_word in output_words if output_word.startswith("NodeAddr=")),
            first_node_name,
        )
        address = _resolve_host(slurm_address)
    if address is None or (address_fault := _find_address_fault(address)):
        resolved_text = "no address" if address is None else f"{address}, {address_fault}"
        raise RendezvousError(
            f"{first_node_name}: its name resolves to {resolved_text}, so other nodes cannot reach it. "
            f"Check /etc/hosts on {first_node_name}."
        )
    return address


def _resolve_host(host_name: str) -> str | None:
    try:
        address_entries = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(address_entry[4][0]) for address_entry in address_entries]
    return next((address for address in addresses if not _find_address_fault(address)), next(iter(addresses), None))


def _find_address_fault(address: str) -> str:
    """Why other nodes cannot reach an address, as a noun with its article; '' if they may reach it."""
    parsed_address, interface = ipaddress.ip_address(address), _map_interface_by_address().get(address.partition("%")[0])
    if parsed_address.is_loopback or parsed_address.is_link_local:
        return "a loopback address" if parsed_address.is_loopback else "a link-local address"
    is_container_address = address == _DOCKER_BRIDGE if interface is None else _CONTAINER_INTERFACE.match(interface)
    return "an address for the containers of one machine" if is_container_address else ""


def _map_interface_by_address() -> dict[str, str]:
    """The network interfaces of this machine, by their addresses."""
    return {
        interface_address.address.partition("%")[0]: interface_name
        for interface_name, interface_addresses in psutil.net_if_addrs().items()
        for interface_address in interface_addresses
    }
