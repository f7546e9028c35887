"""What Slurm's controller says of its nodes."""

from __future__ import annotations

import msgspec

from provision.facts import Fact

FORMAT = "%N|%t|%u|%E"
FLAGS = "*~#!%$@^-+"  # that a short state may end with, such as the * of a node that does not respond
MOST = 200  # characters that are kept of a reason


class SlurmNode(msgspec.Struct, frozen=True):
    """state: short and without flags, such as idle, alloc, drain or down. reason: why it is not available, as text for people,
    empty without one; user: who gave the reason, `slurm` where Slurm did itself."""

    state: str
    user: str = ""
    reason: str = ""


def command(python: str) -> list[str]:
    return ["sh", "-c", f"sinfo -hN -o '{FORMAT}' || true"]  # a controller that does not answer knows of none


def parse(stdout: str) -> dict[str, SlurmNode]:
    """By name. Raises ValueError."""
    found = {}
    for line in stdout.splitlines():
        words = line.split("|", 3)
        if len(words) != 4:
            raise ValueError(f"found {line[:80]!r}. Allowed: {FORMAT}.")
        name, state, user, reason = words
        text = "" if reason == "none" else "".join(char if char.isprintable() else "?" for char in reason)[:MOST]
        found[name] = SlurmNode(state.rstrip(FLAGS), user if text else "", text)
    return found


NODES = Fact("nodes", command, parse, timeout_s=30)
