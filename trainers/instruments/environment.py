"""Records the host, torch and the network of a run in env/HOST.json. A rank on each host writes this file."""

from __future__ import annotations

import os
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch
from torch.cuda.nccl import version as nccl_version

from shardlab.files import files
from shardlab.hardware import host

if TYPE_CHECKING:
    from trainers.ranks.ranks import Ranks

# Names, or the beginnings of names, of environment variables that change how the libraries work. They are recorded, because not
# only users but also the system images of clusters set them.
VARIABLE_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OFI_NCCL_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


def write_environment(path: Path, ranks: Ranks) -> None:
    """Write env/HOST.json: what `shardlab.hardware.host` finds out about this machine, torch's device and versions, environment
    variables, and the network interfaces that this process uses. Called after the rendezvous of the ranks."""
    files.make_folder(path.parent)
    environment: dict[str, Any] = {**msgspec.to_builtins(host.read_host()), "torch": _describe_torch(ranks)}
    environment["variables"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLE_PREFIXES)}
    if (connections_by_interface := _count_connections()) and ranks.world_size > 1:
        # NCCL uses these sockets for its rendezvous. It may then send data over NVLink, PCIe or InfiniBand, which sockets do
        # not show.
        environment["interfaces"] = {
            "used_by": "gloo" if ranks.backend == "gloo" else "nccl, to meet",
            "sockets": connections_by_interface,
        }
    files.write_json(path, environment)


def _describe_torch(ranks: Ranks) -> dict[str, Any]:
    has_gpu = ranks.device.type == "cuda"
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(ranks.device) if has_gpu else "cpu",
        "backend": ranks.backend,
        "nccl": ".".join(map(str, nccl_version())) if has_gpu else None,  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
    }


def _count_connections() -> dict[str, int]:
    """The number of TCP connections of this process on each network interface, without the connections to the store of the
    rendezvous (MASTER_PORT)."""
    interface_by_address = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    port = int(os.environ.get("MASTER_PORT", "0"))
    connections_by_interface: Counter[str] = Counter()
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and port not in (connection.laddr.port, connection.raddr.port):
            connections_by_interface[find_interface(connection.laddr.ip, interface_by_address)] += 1
    return dict(connections_by_interface)


def find_interface(address: str, interface_by_address: dict[str, str]) -> str:
    """The network interface that has an address. interface_by_address: address -> interface. Every address in 127.0.0.0/8
    belongs to the loopback interface."""
    plain_address = address.removeprefix("::ffff:")  # the prefix of an IPv4 address in an IPv6 socket
    if ip_address(plain_address.partition("%")[0]).is_loopback:
        return "lo (loopback)"
    return interface_by_address.get(plain_address) or interface_by_address.get(address) or f"unknown ({plain_address})"
