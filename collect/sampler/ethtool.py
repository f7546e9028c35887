"""Reads the counters of a network driver (`ethtool -S`) with the ioctl that ethtool uses, so that no sample starts a process.

The kernel sees neither RDMA traffic nor packets that the network card drops. If training traffic uses RDMA, the kernel's
counters of the interface do not grow, but the counters of the driver do. The structures are defined in linux/ethtool.h.
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct

SIOCETHTOOL = 0x8946
# ETHTOOL_GSTRINGS, ETHTOOL_GSTATS, ETHTOOL_GSSET_INFO and ETH_SS_STATS of linux/ethtool.h.
GET_STRINGS_COMMAND, GET_STATISTICS_COMMAND, GET_COUNTS_COMMAND = 0x1B, 0x1D, 0x37
STATISTICS_SET = 1
COUNTER_NAME_BYTES, INTERFACE_NAME_BYTES = 32, 16  # the lengths of these names, including zeros that fill them up
MOST_COUNTERS = 1 << 16  # the most counters of one interface; a driver that reports more counters is treated as faulty
# How many more counters a buffer has room for than the driver reported. Between two calls the driver may get more queues, and
# so more counters, and the kernel writes all counters into the buffer.
SPARE_COUNTERS = 4096

# The recorded counters: field of NicSample -> names that drivers give the counter; the first name that a driver has is used.
# The names of mlx5 are explained in the documentation of the kernel (mellanox/mlx5/counters.rst): `phy` counts all bytes on the
# wire, `vport_rdma` counts RDMA alone; the two are never added up.
COUNTER_NAMES_BY_FIELD = {
    "wire_rx_bytes": ("rx_bytes_phy", "port.rx_bytes", "rx_bytes.nic"),
    "wire_tx_bytes": ("tx_bytes_phy", "port.tx_bytes", "tx_bytes.nic"),
    "rdma_rx_bytes": ("rx_vport_rdma_unicast_bytes",),
    "rdma_tx_bytes": ("tx_vport_rdma_unicast_bytes",),
    "rx_pauses": (
        *("rx_pause_ctrl_phy", "rx_pause_frames", "port.link_xoff_rx"),
        *("link_xoff_rx.nic", "rx_flow_control_xoff", "link_xoff_rx"),
    ),
    "tx_pauses": (
        *("tx_pause_ctrl_phy", "tx_pause_frames", "port.link_xoff_tx"),
        *("link_xoff_tx.nic", "tx_flow_control_xoff", "link_xoff_tx"),
    ),
    "rx_discards": ("rx_discards_phy", "rx_total_discard_pkts", "port.rx_dropped", "rx_dropped.nic", "rx_missed_errors"),
    "rx_crc_errors": ("rx_crc_errors_phy", "rx_fcs_err_frames", "port.rx_crc_errors", "rx_crc_errors.nic", "rx_crc_errors"),
    "rx_out_of_buffer": ("rx_out_of_buffer",),
    "rx_bandwidth_limited": ("bw_in_allowance_exceeded",),
    "tx_bandwidth_limited": ("bw_out_allowance_exceeded",),
    "packet_rate_limited": ("pps_allowance_exceeded",),
    "connections_limited": ("conntrack_allowance_exceeded",),
}
# One counter of pause frames for each traffic class: of mlx5, of bnxt_en, and of i40e (`port.`; newer kernels end its names in
# the direction) and ice (`.nic`). Frames that end a pause early (xon) are not counted, as in the counters of the whole link.
_PRIORITY_PAUSES = re.compile(
    r"([rt]x)_prio[0-7]_pause|([rt]x)_pfc_ena_frames_pri[0-7]|(?:port\.)?([rt]x)_priority_[0-7]_xoff(?:_[rt]x)?(?:\.nic)?"
)


def find_counters(counter_names: list[str]) -> dict[str, list[int]]:
    """Find the recorded counters of a driver. Returns {field of NicSample: indexes in `counter_names`}.

    counter_names: the names of all counters of the driver, in the driver's order. If a field has several indexes, the values of
    these counters are added up."""
    index_by_name = {name: counter_index for counter_index, name in reversed(list(enumerate(counter_names)))}
    indexes_by_field = {}
    for sample_field, driver_names in COUNTER_NAMES_BY_FIELD.items():
        if (name := next((name for name in driver_names if name in index_by_name), None)) is not None:
            indexes_by_field[sample_field] = [index_by_name[name]]
    for counter_index, name in enumerate(counter_names):
        if match := _PRIORITY_PAUSES.fullmatch(name):
            indexes_by_field.setdefault(f"{match[match.lastindex or 1]}_priority_pauses", []).append(counter_index)
    return indexes_by_field


class DriverCounters:
    """The counters that the driver of a network interface has. One system call reads all of them."""

    def __init__(self, interface_name: str) -> None:
        """Find the counters of an interface.

        Raises OSError if the driver has no counters, ValueError if it reports more than MOST_COUNTERS.
        """
        self._interface_name = interface_name.encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._locate_counters()
        except (OSError, ValueError):
            self.close()
            raise

    def read(self) -> dict[str, int]:
        """Read the recorded counters. Returns {field of NicSample: present value}.

        Raises OSError, such as ENODEV if the interface was removed.
        """
        if not self._indexes_by_field:
            return {}
        if self._read_counter_count() != self._counter_count:
            self._locate_counters()
        struct.pack_into("II", self._values_buffer, 0, GET_STATISTICS_COMMAND, self._counter_count)
        self._call_driver(self._values_buffer)
        counter_values = memoryview(self._values_buffer).cast("B")[8 : 8 + 8 * self._counter_count].cast("Q")
        return {field: sum(counter_values[index] for index in indexes) for field, indexes in self._indexes_by_field.items()}

    def close(self) -> None:
        """Close the socket through which the kernel is asked for the counters."""
        self._socket.close()

    def _locate_counters(self) -> None:
        """Find the indexes of the recorded counters. The indexes change if the number of queues of the interface changes."""
        self._counter_count = self._read_counter_count()
        if self._counter_count > MOST_COUNTERS:
            raise ValueError(f"a driver with {self._counter_count} counters")
        names_buffer = array.array("B", bytes(12 + COUNTER_NAME_BYTES * (self._counter_count + SPARE_COUNTERS)))
        struct.pack_into("III", names_buffer, 0, GET_STRINGS_COMMAND, STATISTICS_SET, self._counter_count)
        self._call_driver(names_buffer)
        joined_names = names_buffer.tobytes()[12 : 12 + COUNTER_NAME_BYTES * self._counter_count]
        name_offsets = range(0, len(joined_names), COUNTER_NAME_BYTES)
        padded_names = [joined_names[name_offset : name_offset + COUNTER_NAME_BYTES] for name_offset in name_offsets]
        self._indexes_by_field = find_counters([name.partition(b"\0")[0].decode(errors="replace") for name in padded_names])
        self._values_buffer = array.array("B", bytes(8 + 8 * (self._counter_count + SPARE_COUNTERS)))

    def _read_counter_count(self) -> int:
        request = array.array("B", struct.pack("IIQI", GET_COUNTS_COMMAND, 0, 1 << STATISTICS_SET, 0))
        self._call_driver(request)
        _, _, reported_sets, counter_count = struct.unpack("IIQI", request)
        return int(counter_count) if reported_sets else 0

    def _call_driver(self, request_buffer: array.array[int]) -> None:
        address, _ = request_buffer.buffer_info()
        padding = bytes(64 - INTERFACE_NAME_BYTES - 8)  # struct ifreq has 40 bytes; a longer buffer is allowed
        ifreq = struct.pack(f"{INTERFACE_NAME_BYTES}sQ", self._interface_name[: INTERFACE_NAME_BYTES - 1], address) + padding
        fcntl.ioctl(self._socket, SIOCETHTOOL, ifreq)
