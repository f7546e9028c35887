"""Reboots a node and checks that it did: the node is back when its boot id differs from the one before."""

from __future__ import annotations

import time

import msgspec

from provision.fact import Unanswered
from provision.node import Node, last_line
from shardlab.remote import Unreachable

BOOT_ID = "/proc/sys/kernel/random/boot_id"
STARTS_S = 120.0  # for its services to start, once it can be logged in to


class Reboot(msgspec.Struct, frozen=True):
    """The last change of a plan; the remaining changes are planned when the machine is back.

    limit_s: for the reboot; a server with much memory tests it for minutes. pause_s: between two questions whether it is back.
    """

    why: str
    limit_s: float = 600.0
    pause_s: float = 2.0

    @property
    def says(self) -> str:
        return f"reboot it, because {self.why}; further changes are planned after the reboot"

    @property
    def command(self) -> str:
        return "systemctl reboot"

    @property
    def script(self) -> str:
        return self.command

    def make(self, node: Node) -> None:
        """Raises Unanswered if the machine does not come back in time, or did not reboot."""
        before = boot_of(node)
        if before is None:
            raise Unanswered(f"{node.name}: its boot id is not known, so a reboot could not be verified")
        _ask(node)
        ends = time.monotonic() + self.limit_s
        while time.monotonic() < ends:
            if boot_of(node) not in (None, before):
                _wait(node)
                return
            time.sleep(self.pause_s)
        went = "it has not rebooted" if boot_of(node) == before else "it does not answer"
        raise Unanswered(f"{node.name}: {went}, {self.limit_s:g} s after the command to reboot; look at its console")


def boot_of(node: Node) -> str | None:
    """The boot id of the machine; None if it does not answer."""
    try:
        answer = node.run(["cat", BOOT_ID], timeout_s=10)
    except Unreachable:
        return None
    return answer.stdout.strip() or None if answer.code == 0 else None


def _ask(node: Node) -> None:
    try:
        answer = node.run(["systemctl", "reboot"], timeout_s=30, root=True)
    except Unreachable:
        return  # it went before it could say so
    if answer.code is not None and 0 < answer.code < 128:  # above: a signal, as it went
        raise Unanswered(f"{node.name}: it does not reboot: {last_line(answer)}")


def _wait(node: Node) -> None:
    """Wait until all services have started. A service that failed to start is no error of the reboot."""
    node.run(["systemctl", "is-system-running", "--wait"], timeout_s=STARTS_S)
