"""The rendezvous of a job's ranks: its address, and the interface to it (between nodes never a loopback)."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from jobs.slurm.commands import call
from shardlab.errors import ShardlabError

RENDEZVOUS, MEETING = "SHARDLAB_RENDEZVOUS", "SHARDLAB_MEETING"
PORTS = range(20_000, 30_000)  # below the ports that Linux gives to outgoing connections
# The number of this node in its run, from 0 (without Slurm), and the names or addresses of all nodes of the run.
NODE, NODES = "SHARDLAB_NODE", "SHARDLAB_NODES"


class NoMeeting(ShardlabError):
    """The nodes of a job have no address under which the others could reach them."""


class RendezvousInterface(msgspec.Struct, frozen=True):
    """This node's interface towards the others, and its address there."""

    interface: str
    address: str


def call_together(nnodes: int) -> dict[str, str]:
    """Choose the rendezvous, on the job's first node. Returns its address, its name and the job's nodes as variables for the
    ranks, which cannot ask Slurm in a container.

    The port is free now. If another program takes it before the ranks start, the run fails with that reason. Raises NoMeeting.
    """
    names = _nodes_of_job()  # if `salloc` started this process on the login node, only the list says which node is the first
    node = os.environ.get("SLURMD_NODENAME") or next(iter(names), socket.gethostname())
    address = "127.0.0.1" if nnodes == 1 else _address(node)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
        try:
            listening.bind((address, 0))
            port = listening.getsockname()[1]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            port = secrets.choice(PORTS)  # the address is of another node: this process runs where `salloc` was called
    host = f"[{address}]" if ":" in address else address
    name = f"{os.environ.get('SLURM_JOB_ID', 'local')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}-{port}"
    return {RENDEZVOUS: f"{host}:{port}", MEETING: name, NODES: ",".join(names)}


def node_number(environment: Mapping[str, str]) -> int:
    """The number of this node in its run, from 0. environment: the variables of a task of the run."""
    return int(environment.get(NODE) or environment.get("SLURM_NODEID", "0"))


def master() -> dict[str, str]:
    """The rendezvous as variables for torch's env://, for ranks whose launcher does not set them."""
    host, _, port = os.environ[RENDEZVOUS].rpartition(":")
    return {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}


def way_to(rendezvous: str, others: Sequence[str]) -> RendezvousInterface:
    """How this node reaches the rendezvous or, on the rendezvous' own node, another node. Raises NoMeeting."""
    host = rendezvous.rpartition(":")[0].strip("[]")
    if ipaddress.ip_address(host).is_loopback:
        return RendezvousInterface("lo", host)
    here = {entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    far = host
    if host in here:
        far = next((address for name in others if (address := _resolved(name)) and address not in here), host)
    with socket.socket(socket.AF_INET6 if ":" in far else socket.AF_INET, socket.SOCK_DGRAM) as looking:
        looking.connect((far, 9))  # sends nothing: it asks the kernel for the route
        own = looking.getsockname()[0]
    if own not in here or ipaddress.ip_address(own).is_loopback:
        raise NoMeeting(f"{socket.gethostname()}: the route to {far} uses the address {own}, which no other node can reach.")
    return RendezvousInterface(here[own], own)


def _nodes_of_job() -> list[str]:
    """The names of the job's nodes; [] outside of a job. Only Slurm can expand a list; one name needs no command."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if not any(sign in listed for sign in "[,"):
        return [listed] if listed else []
    return call(["scontrol", "show", "hostnames", listed]).stdout.split()


def _address(node: str) -> str:
    """The first node's address for the other nodes: by its name, or Slurm's NodeAddr if the name resolves to a loopback."""
    address = _resolved(node)
    if address is None or ipaddress.ip_address(address).is_loopback:
        said = call(["scontrol", "show", "node", node]).stdout.split()
        stated = next((word.partition("=")[2] for word in said if word.startswith("NodeAddr=")), node)
        address = _resolved(stated)
    if address is None or ipaddress.ip_address(address).is_loopback:
        where = address or "no address"
        raise NoMeeting(f"{node}: its name resolves to {where}, so other nodes cannot reach it. Check /etc/hosts on {node}.")
    return address


def _resolved(name: str) -> str | None:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(entry[4][0]) for entry in entries]
    return next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), None) or next(
        iter(addresses), None
    )
