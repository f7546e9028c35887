"""The RDMA links of a machine and their states, from the kernel, so that no tool has to be installed."""

from __future__ import annotations

import re

import msgspec

from provision.facts import Fact

# A slot of the table of GIDs that is not in use is an error to read.
PROGRAM = """\
for port in /sys/class/infiniband/*/ports/*; do
    test -d "$port" || continue
    device=${port#/sys/class/infiniband/}
    kinds=$(cat "$port"/gid_attrs/types/* 2>/dev/null | sort -u | tr '\\n' ',')
    nic=$(cat "$port"/gid_attrs/ndevs/* 2>/dev/null | head -n 1)
    printf '%s\\t%s\\t%s\\t%s\\t%s\\t%s\\n' "${device%%/*}" "${port##*/}" "$(cat "$port/state")" "$(cat "$port/link_layer")" \\
        "$nic" "$kinds"
done
"""
_STATE = re.compile(r"^\d+: ([A-Z_]+)$")


class Link(msgspec.Struct, frozen=True):
    """state: ACTIVE, DOWN, INIT, ... layer: Ethernet or InfiniBand. nic: its network interface, None without one. gids: such as
    `RoCE v2`."""

    device: str
    port: int
    state: str
    layer: str
    nic: str | None
    gids: list[str]

    @property
    def name(self) -> str:
        return f"{self.device}/{self.port}"


def command(python: str) -> list[str]:
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> list[Link]:
    """Raises ValueError."""
    return [_link(line) for line in stdout.splitlines() if line.strip()]


def _link(line: str) -> Link:
    fields = line.split("\t")
    if len(fields) != 6 or (state := _STATE.match(fields[2])) is None:
        raise ValueError(f"found {line!r}. Allowed: device, port, state, layer, interface, GID types.")
    device, port, _, layer, nic, gids = fields
    return Link(device, int(port), state[1], layer, nic or None, [one for one in gids.split(",") if one])


RDMA = Fact("rdma", command, parse, timeout_s=30)
