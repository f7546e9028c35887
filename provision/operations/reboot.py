"""Reboots a node and verifies the reboot: the node has rebooted when its boot id differs from the boot id before the reboot."""

from __future__ import annotations

import time

import msgspec

from provision.fact import Unanswered
from provision.node import Node, find_error_line
from shardlab.remote.remote import Unreachable

BOOT_ID = "/proc/sys/kernel/random/boot_id"
STARTS_S = 120.0  # the most seconds for the services of a node to start after a login is possible


class Reboot(msgspec.Struct, frozen=True):
    """A change that reboots the node. It is the last change of a plan; further changes are planned when the node is back."""

    reason: str
    """The reason, as a clause."""
    limit_s: float = 600.0
    """The most seconds that the reboot may take; a server with much memory tests its memory for minutes."""
    pause_s: float = 2.0
    """The seconds between two attempts to reach the node."""

    @property
    def description(self) -> str:
        return f"reboot it, because {self.reason}; further changes are planned after the reboot"

    @property
    def command(self) -> str:
        return "systemctl reboot"

    @property
    def script(self) -> str:
        return self.command

    def make(self, node: Node) -> None:
        """Reboot the node and wait until it is back. Raises Unanswered if it did not reboot, or does not come back in time."""
        old_boot_id = read_boot_id(node)
        if old_boot_id is None:
            raise Unanswered(f"{node.name}: its boot id is not known, so a reboot could not be verified")
        _order_reboot(node)
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            if read_boot_id(node) not in (None, old_boot_id):
                _wait_for_services(node)
                return
            time.sleep(self.pause_s)
        failure_clause = "it has not rebooted" if read_boot_id(node) == old_boot_id else "it does not answer"
        raise Unanswered(f"{node.name}: {failure_clause}, {self.limit_s:g} s after the command to reboot; look at its console")


def read_boot_id(node: Node) -> str | None:
    """The boot id of a node, which differs after each boot; None if the node does not answer."""
    try:
        cat_output = node.run(["cat", BOOT_ID], timeout_s=10)
    except Unreachable:
        return None
    return cat_output.stdout.strip() or None if cat_output.code == 0 else None


def _order_reboot(node: Node) -> None:
    try:
        answer = node.run(["systemctl", "reboot"], timeout_s=30, root=True)
    except Unreachable:
        return  # the node went down before it could answer the command
    if answer.code is not None and 0 < answer.code < 128:  # above 128: the shutdown ended ssh by a signal, which is no failure
        raise Unanswered(f"{node.name}: it does not reboot: {find_error_line(answer)}")


def _wait_for_services(node: Node) -> None:
    """Wait until all services of a node have started. If a service fails to start, the reboot still counts as successful."""
    node.run(["systemctl", "is-system-running", "--wait"], timeout_s=STARTS_S)
