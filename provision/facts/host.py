"""The hardware and software of a machine: processors, memory, GPUs, network interfaces, packages."""

from __future__ import annotations

from provision.fact import FactQuery, decode_last_line
from shardlab.hardware.host import Host


def build_command(python: str) -> list[str]:
    """The command that prints the host as JSON. It needs the environment of shardlab on the node."""
    return [python, "-m", "shardlab.hardware.host"]


def parse(stdout: str) -> Host:
    """The host that `python -m shardlab.hardware.host` printed as JSON. Raises ValueError."""
    return decode_last_line(stdout, Host)


HOST = FactQuery("host", build_command, parse, timeout_s=30)
