"""The states of the nodes, as Slurm's controller reports them."""

from __future__ import annotations

import msgspec

from provision.fact import Fact

FORMAT = "%N|%t|%u|%E"
FLAGS = "*~#!%$@^-+"  # that a short state may end with, such as the * of a node that does not respond
MOST = 200  # characters that are kept of a reason


class SlurmNode(msgspec.Struct, frozen=True):
    """A node of Slurm."""

    state: str  # short and without flags, such as idle, alloc, drain or down
    user: str = ""  # who gave the reason; `slurm`: Slurm itself
    reason: str = ""  # why the node is not available, as text for people; empty: no reason


def command(python: str) -> list[str]:
    """Asks Slurm's controller."""
    return ["sh", "-c", f"sinfo -hN -o '{FORMAT}' || true"]  # a controller that does not answer reports no nodes


def parse(stdout: str) -> dict[str, SlurmNode]:
    """By name. Raises ValueError."""
    nodes = {}
    for line in stdout.splitlines():
        words = line.split("|", 3)
        if len(words) != 4:
            raise ValueError(f"found {line[:80]!r}. Allowed: {FORMAT}.")
        name, state, user, reason = words
        text = "" if reason == "none" else "".join(char if char.isprintable() else "?" for char in reason)[:MOST]
        nodes[name] = SlurmNode(state.rstrip(FLAGS), user if text else "", text)
    return nodes


NODES = Fact("nodes", command, parse, timeout_s=30)
