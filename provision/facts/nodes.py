"""The states of the nodes, as Slurm's controller reports them."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery
from shardlab.cluster.slurm_cluster import drop_cluster_headers

SINFO_FORMAT = "%N|%t|%u|%E"
STATE_FLAGS = "*~#!%$@^-+"  # characters with which a state may end, such as * for a node that does not respond
MOST_REASON = 200  # the most characters of a reason; the rest is cut off


class SlurmNode(msgspec.Struct, frozen=True):
    """The state of a node, as Slurm's controller reports it."""

    state: str
    """Slurm's short name of the state, without flags, such as idle, alloc, drain or down."""
    user: str = ""
    """The user who set the reason; `slurm`: Slurm itself."""
    reason: str = ""
    """Why the node is not available, as text for people; empty: no reason."""


def build_command(python: str) -> list[str]:
    """The command that asks Slurm's controller for its nodes. The command prints no nodes if the controller does not answer."""
    return ["sh", "-c", f"sinfo -hN -o '{SINFO_FORMAT}' || true"]


def parse(stdout: str) -> dict[str, SlurmNode]:
    """The nodes of Slurm, by name. Raises ValueError."""
    node_by_name = {}
    for line in drop_cluster_headers(stdout).splitlines():
        line_fields = line.split("|", 3)
        if len(line_fields) != 4:
            raise ValueError(f"found {line[:80]!r}. Allowed: {SINFO_FORMAT}.")
        node_name, state, user, reason = line_fields
        reason_text = "" if reason == "none" else "".join(char if char.isprintable() else "?" for char in reason)[:MOST_REASON]
        node_by_name[node_name] = SlurmNode(state.rstrip(STATE_FLAGS), user if reason_text else "", reason_text)
    return node_by_name


NODES = FactQuery("nodes", build_command, parse, timeout_s=30)
