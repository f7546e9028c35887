"""Reads from the log of a rank which transports NCCL uses (needs NCCL_LOG).

A log may contain any text, so only lines in the exact format of NCCL are used. Only the beginning of a long log is read,
because NCCL writes these lines when it connects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shardlab.files import files

# With these variables, NCCL logs once how its ranks are connected.
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
# The marks in the log of a rank before its first and after its last timed step: lines of NCCL between them are of these steps.
TIMED_STEPS_BEGIN, TIMED_STEPS_END = "shardlab: timed steps begin", "shardlab: timed steps end"
MOST_BYTES = 8 << 20  # at most this many bytes are read, from the beginning of a log
MOST_DEVICES = 32
# A line about a connection, such as: Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
_CHANNEL_PATTERN = re.compile(
    rb"NCCL INFO Channel \d{1,4}(?:/\d{1,4})? : \d{1,6}\[[0-9a-f]{1,16}\] -> \d{1,6}\[[0-9a-f]{1,16}\]"
    rb"(?: \[(?:send|receive)\])? via (NET/(?:AWS )?[A-Za-z0-9_]{1,24}|P2P|SHM)([/A-Za-z0-9:+()-]{0,64})"
)
# A line about RDMA devices, such as: NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB eno1:10.0.0.1<0>
_DEVICES_PATTERN = re.compile(rb"NCCL INFO NET/IB : Using ([^\n;]{1,2000})")
_DEVICE_PATTERN = re.compile(rb"\[\d{1,3}\]([A-Za-z0-9_.-]{1,32}):\d{1,3}/(RoCE|IB)(?![A-Za-z])")
_SOCKETS_PATTERN = re.compile(rb"NCCL INFO NET/Socket : Using ([^\n;]{1,2000})")
_SOCKET_PATTERN = re.compile(rb"\[\d{1,3}\]([A-Za-z0-9_.@-]{1,15}):")
# A line of the plug-in aws-ofi-nccl, such as: NET/OFI Selected Provider is cxi (found 4 nics)
_PROVIDER_PATTERN = re.compile(rb"NCCL INFO NET/OFI Selected [Pp]rovider is ([a-z0-9_]{1,24})")
_OFI_TRANSPORTS = ("NET/AWS Libfabric", "NET/Libfabric")  # the names of this plug-in in lines about connections
# Providers of libfabric: those of EFA, Slingshot, InfiniBand and Omni-Path use RDMA, the others use TCP.
_RDMA_PROVIDERS, _TCP_PROVIDERS = {"efa", "cxi", "verbs", "psm2", "psm3", "opx"}, {"tcp", "sockets", "udp"}


class NcclTransports(msgspec.Struct, omit_defaults=True):
    """The transports that connect the ranks of a run."""

    channels: dict[str, int] = {}
    """The number of connections by transport: P2P (NVLink or PCIe within a node), SHM (memory of the node), NET/IB (RDMA),
    NET/Socket (TCP), or NET/ and the name of a plug-in."""
    gpudirect: int = 0
    """The number of connections between nodes that bypass the memory of the hosts (GPUDirect RDMA)."""
    devices: list[str] = []
    """The RDMA devices that NCCL uses, each with its link, such as `mlx5_0 (RoCE)`."""
    interfaces: list[str] = []
    """The network interfaces that NET/Socket uses."""
    providers: list[str] = []
    """The providers of libfabric that the plug-in aws-ofi-nccl chose, such as `cxi` (Slingshot) or `efa`."""

    @property
    def rdma(self) -> bool | None:
        """Whether RDMA carried data between nodes.

        None if this is not known, because the logs name no transports, or only a plug-in that may or may not use RDMA.
        """
        if any(transport.startswith("NET/IB") for transport in self.channels):  # NET/IBext is the plug-in of HPC-X
            return True
        plugin_transports = {transport for transport in self.channels if transport.startswith("NET/")} - {"NET/Socket"}
        if not plugin_transports:
            return False if self.channels else None
        if not plugin_transports.issubset(_OFI_TRANSPORTS) or not self.providers:
            return None
        if _RDMA_PROVIDERS.issuperset(self.providers):
            return True
        return False if _TCP_PROVIDERS.issuperset(self.providers) else None

    def describe(self) -> str | None:
        """The transports between nodes in words, such as `NET/IB on mlx5_0 (IB), with GPUDirect RDMA`; None: there are none."""
        notes = {"NET/IB": self.devices, "NET/Socket": self.interfaces, **dict.fromkeys(_OFI_TRANSPORTS, self.providers)}
        network_transports = sorted(name for name in self.channels if name.startswith("NET/"))
        phrases = [f"{name} on {', '.join(notes[name])}" if notes.get(name) else name for name in network_transports]
        return f"{' and '.join(phrases)}{', with GPUDirect RDMA' if self.gpudirect else ''}" if phrases else None


def read_transports(log_paths: Iterable[Path]) -> NcclTransports:
    """The transports that NCCL uses, from the logs of all ranks of a run together. A log that cannot be read is skipped."""
    nccl_transports = NcclTransports()
    for log_path in log_paths:
        try:
            with files.open_regular(log_path) as log_file:
                add_log(nccl_transports, log_file.read(MOST_BYTES))
        except OSError:
            continue
    return nccl_transports


def add_log(nccl_transports: NcclTransports, log_bytes: bytes) -> None:
    """Add the connections in one log to `nccl_transports`. The log of a rank contains the connections from or to this rank."""
    for transport_bytes, channel_details in _CHANNEL_PATTERN.findall(log_bytes):
        transport_name = transport_bytes.decode()
        nccl_transports.channels[transport_name] = nccl_transports.channels.get(transport_name, 0) + 1
        nccl_transports.gpudirect += transport_name.startswith("NET/") and b"/GDRDMA" in channel_details
    for line_pattern, device_pattern, known_names in (
        (_DEVICES_PATTERN, _DEVICE_PATTERN, nccl_transports.devices),
        (_SOCKETS_PATTERN, _SOCKET_PATTERN, nccl_transports.interfaces),
    ):
        for line in line_pattern.findall(log_bytes):
            for match in device_pattern.finditer(line):
                device_words = [device_word.decode() for device_word in match.groups()]
                device_label = f"{device_words[0]} ({device_words[1]})" if len(device_words) > 1 else device_words[0]
                _add_name(known_names, device_label)
    for match in _PROVIDER_PATTERN.finditer(log_bytes):
        _add_name(nccl_transports.providers, match[1].decode())


def _add_name(known_names: list[str], device_name: str) -> None:
    if device_name not in known_names and len(known_names) < MOST_DEVICES:
        known_names.append(device_name)
