"""Asks OpenSSH what `~/.ssh/config` says about a machine, and through which machines a connection to it goes (ProxyJump).

OpenSSH's own ProxyJump is used only for shared connections: OpenSSH applies the options for host keys on its command line only
to the last machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence

import msgspec

LIMIT_S = 10.0  # time limit of `ssh -G`
_JUMP_PATTERN = re.compile(r"(?:ssh://)?(?:(.*)@)?(?:\[(.+)\]|([^:]+))(?::(\d+))?/?")


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
        port_words = ["-p", str(self.port)] if self.port is not None else []
        user_words = ["-l", self.user] if self.user is not None else []
        return [*port_words, *user_words, "--", self.host]


def read_settings(jump_host: JumpHost) -> dict[str, str]:
    """The settings of OpenSSH for a machine (`ssh -G`), by their names in small letters. Empty if OpenSSH is not installed or
    does not answer within LIMIT_S."""
    try:
        ssh_output = subprocess.run(["ssh", "-G", *jump_host.words], capture_output=True, timeout=LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    setting_lines = ssh_output.decode("utf-8", "surrogateescape").splitlines()
    return dict(setting_line.split(" ", 1) for setting_line in setting_lines if " " in setting_line)


def find_jumps(ssh_settings: Mapping[str, str]) -> tuple[JumpHost, ...]:
    """The machines through which a connection goes, in the order of the connections. ssh_settings: those of the last
    machine."""
    jump_hosts: tuple[JumpHost, ...] = ()
    while True:
        jump_list = ssh_settings.get("proxyjump", "none")
        jump_names = [] if jump_list == "none" else jump_list.split(",")
        further_jumps = [jump for jump_name in jump_names if (jump := _parse_jump(jump_name)) is not None]
        if not further_jumps or further_jumps[0] in jump_hosts:  # no further jumps, or the jumps form a circle
            return jump_hosts
        jump_hosts = (*further_jumps, *jump_hosts)
        ssh_settings = read_settings(jump_hosts[0])


def make_proxy_option(jump_hosts: Sequence[JumpHost], login_rules: Callable[[JumpHost], Sequence[str]]) -> list[str]:
    """The option with which an OpenSSH command connects through the machines `jump_hosts`; empty if there are no jumps.

    login_rules: returns further options for the login on one of these machines, such as the options for host keys.
    """
    proxy_words: list[str] = []
    for jump in jump_hosts:
        command_words = shlex.join([*login_rules(jump), *proxy_words, *jump.words]).replace("%", "%%")
        # OpenSSH replaces %h and %p, and turns %% into %
        proxy_words = ["-o", f"ProxyCommand=ssh -W '[%h]:%p' {command_words}"]
    return proxy_words


def _parse_jump(jump_text: str) -> JumpHost | None:
    match = _JUMP_PATTERN.fullmatch(jump_text.strip())
    return JumpHost(match[2] or match[3], match[1], int(match[4]) if match[4] else None) if match else None
