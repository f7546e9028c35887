"""What Slurm's controller says of its nodes."""

from __future__ import annotations

from provision.facts import Fact


def command(python: str) -> list[str]:
    return ["sh", "-c", "sinfo -hN -o '%N %t' || true"]  # a controller that does not answer knows of none


def parse(stdout: str) -> dict[str, str]:
    """Name to short state, such as idle, alloc or down*. Raises ValueError."""
    return dict(line.split(" ", 1) for line in sorted(set(stdout.splitlines())))


NODES = Fact("nodes", command, parse, timeout_s=30)
