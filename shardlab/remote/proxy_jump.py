"""Finds the machines through which an SSH connection to a machine goes (ProxyJump in `~/.ssh/config`) by asking OpenSSH.

The library fabric cannot be used for this: it uses several jumps in the opposite order, and treats `ProxyJump none` as a jump
through a machine named none. OpenSSH's own ProxyJump cannot be used either: OpenSSH applies the options for host keys on its
command line only to the last machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence

import msgspec

LIMIT_S = 10.0  # time limit of `ssh -G`
_JUMP = re.compile(r"(?:ssh://)?(?:(.*)@)?(?:\[(.+)\]|([^:]+))(?::(\d+))?/?")


class JumpHost(msgspec.Struct, frozen=True):
    """A machine through which a connection goes (a proxy jump), or the machine to which it leads."""

    host: str
    user: str | None = None
    """For the login to this machine; None: `~/.ssh/config` decides."""
    port: int | None = None
    """For the login to this machine; None: `~/.ssh/config` decides."""

    @property
    def words(self) -> list[str]:
        """The last words of an OpenSSH command that connects to this machine."""
        port = ["-p", str(self.port)] if self.port is not None else []
        user = ["-l", self.user] if self.user is not None else []
        return [*port, *user, "--", self.host]


class Route(msgspec.Struct, frozen=True):
    """How to connect to a machine."""

    jumps: tuple[JumpHost, ...] = ()
    """The machines through which the connection goes, in the order of the connections."""
    command: str = ""
    """The ProxyCommand of `~/.ssh/config` if there are no jumps; else empty."""


def find_route(target: JumpHost) -> Route | None:
    """The route to this machine; None if OpenSSH is not installed or does not answer within LIMIT_S."""
    found_jumps: tuple[JumpHost, ...] = ()
    first_machine = target
    while True:
        try:
            ssh_command = ["ssh", "-G", *first_machine.words]
            ssh_output = subprocess.run(ssh_command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        settings = dict(line.split(" ", 1) for line in ssh_output.splitlines() if " " in line)
        jump_list = settings.get("proxyjump", "none")
        jumps = (
            [] if jump_list == "none" else [jump for name in jump_list.split(",") if (jump := _parse_jump(name)) is not None]
        )
        if not jumps or jumps[0] in found_jumps:  # no further jumps, or the jumps form a circle
            return Route(found_jumps, "" if found_jumps else settings.get("proxycommand", ""))
        found_jumps = (*jumps, *found_jumps)
        first_machine = jumps[0]


def proxy_option(jumps: Sequence[JumpHost], rules: Sequence[str]) -> list[str]:
    """The option with which an OpenSSH command connects through the machines `jumps`; empty if there are no jumps.

    rules: further options, such as the options for host keys, for the login on each of these machines.
    """
    proxy_words: list[str] = []
    for jump in jumps:
        words = shlex.join([*rules, *proxy_words, *jump.words]).replace("%", "%%")
        proxy_words = ["-o", f"ProxyCommand=ssh -W '[%h]:%p' {words}"]  # OpenSSH replaces %h and %p, and turns %% into %
    return proxy_words


def _parse_jump(text: str) -> JumpHost | None:
    match = _JUMP.fullmatch(text.strip())
    return JumpHost(match[2] or match[3], match[1], int(match[4]) if match[4] else None) if match else None
