"""The machines through which `~/.ssh/config` leads to another one (ProxyJump), as OpenSSH itself reads it.

fabric would go through several in the opposite order and take `ProxyJump none` for a machine of that name; OpenSSH would hold
none but the last machine to what its command line says of host keys.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence

import msgspec

LIMIT_S = 10.0
_JUMP = re.compile(r"(?:ssh://)?(?:(.*)@)?(?:\[(.+)\]|([^:]+))(?::(\d+))?/?")


class Jump(msgspec.Struct, frozen=True):
    """A machine on the way; user, port: None leaves it to `~/.ssh/config`."""

    host: str
    user: str | None = None
    port: int | None = None

    @property
    def words(self) -> list[str]:
        """What ends a command of OpenSSH that goes there."""
        port = ["-p", str(self.port)] if self.port is not None else []
        user = ["-l", self.user] if self.user is not None else []
        return [*port, *user, "--", self.host]


class Way(msgspec.Struct, frozen=True):
    """jumps: the first machine first. command: what else connects there (ProxyCommand), or ''."""

    jumps: tuple[Jump, ...] = ()
    command: str = ""


def way(to: Jump) -> Way | None:
    """How that machine is reached; None where there is no OpenSSH to ask."""
    found: tuple[Jump, ...] = ()
    first = to
    while True:
        try:
            asked = ["ssh", "-G", *first.words]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        settings = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
        listed = settings.get("proxyjump", "none")
        jumps = [] if listed == "none" else [jump for one in listed.split(",") if (jump := _read(one)) is not None]
        if not jumps or jumps[0] in found:  # a circle
            return Way(found, "" if found else settings.get("proxycommand", ""))
        found = (*jumps, *found)
        first = jumps[0]


def option(jumps: Sequence[Jump], rules: Sequence[str]) -> list[str]:
    """The option of an OpenSSH command that leads through these machines, each by these rules."""
    found: list[str] = []
    for jump in jumps:
        words = shlex.join([*rules, *found, *jump.words]).replace("%", "%%")
        found = ["-o", f"ProxyCommand=ssh -W '[%h]:%p' {words}"]  # a % begins what OpenSSH fills in
    return found


def _read(text: str) -> Jump | None:
    match = _JUMP.fullmatch(text.strip())
    return Jump(match[2] or match[3], match[1], int(match[4]) if match[4] else None) if match else None
