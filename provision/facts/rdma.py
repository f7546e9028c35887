"""The RDMA links of a machine and their states, from the kernel, so that no tool has to be installed."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery

# To read an unused slot of the kernel's table of GIDs is an error, which DESCRIBE_RDMA ignores.
DESCRIBE_RDMA = """\
for port in /sys/class/infiniband/*/ports/*; do
    test -d "$port" || continue
    device=${port#/sys/class/infiniband/}
    kinds=$(cat "$port"/gid_attrs/types/* 2>/dev/null | sort -u | tr '\\n' ',')
    nic=$(cat "$port"/gid_attrs/ndevs/* 2>/dev/null | head -n 1)
    printf '%s\\t%s\\t%s\\t%s\\t%s\\t%s\\t%s\\n' "${device%%/*}" "${port##*/}" "$(cat "$port/state")" \\
        "$(cat "$port/link_layer")" "$nic" "$kinds" "$(cat "$port/rate" 2>/dev/null)"
done
"""
_STATE_PATTERN = re.compile(r"^\d+: ([A-Z_]+)\Z")
_RATE_PATTERN = re.compile(r"^(\d+(?:\.\d+)?) Gb/sec")


class RdmaLink(msgspec.Struct, frozen=True):
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    """The state of the link: ACTIVE, DOWN, INIT, ..."""
    layer: str
    """The link layer: Ethernet or InfiniBand."""
    nic: str | None
    """The network interface of the link; None: it has none."""
    gids: list[str]
    """The types of the link's GIDs, such as `RoCE v2`."""
    gbit_per_s: float | None = None
    """The rate of the link in Gbit/s in one direction; None: the kernel does not say it."""

    @property
    def name(self) -> str:
        """The name of the link, DEVICE/PORT, as the command `rdma link` writes it."""
        return f"{self.device}/{self.port}"


def build_command(python: str) -> list[str]:
    """The command that reads the kernel's files about RDMA devices."""
    return ["sh", "-c", DESCRIBE_RDMA]


def parse(stdout: str) -> list[RdmaLink]:
    """The RDMA links in the output of DESCRIBE_RDMA. Raises ValueError."""
    return [_parse_link(line) for line in stdout.splitlines() if line.strip()]


def _parse_link(line: str) -> RdmaLink:
    line_fields = line.split("\t")
    if len(line_fields) != 7 or (state_match := _STATE_PATTERN.match(line_fields[2])) is None:
        raise ValueError(f"found {line!r}. Allowed: device, port, state, layer, interface, GID types, rate.")
    device, port, _, link_layer, nic, gid_list, rate_text = line_fields
    rate_match = _RATE_PATTERN.match(rate_text)
    gid_types = [gid_type for gid_type in gid_list.split(",") if gid_type]
    return RdmaLink(
        device,
        int(port),
        state_match[1],
        link_layer,
        nic or None,
        gid_types,
        float(rate_match[1]) if rate_match is not None else None,
    )


RDMA = FactQuery("rdma", build_command, parse, timeout_s=30)
