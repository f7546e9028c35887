"""Operations, one per file: each reads facts and returns the changes that a node needs, or why it needs none."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from provision.facts import Fact, Facts, Unanswered, last_line
from provision.providers import Answer, Node
from shardlab.cluster import Cluster, Entry
from shardlab.workspace import Workspace

T = TypeVar("T")
_FULL = re.compile("No space left on device|Disk quota exceeded|enough free space")


@dataclass(frozen=True)
class Target:
    """A node and its answers. entry: its entry in the cluster file, None for this machine (provider local)."""

    node: Node
    facts: Facts
    entry: Entry | None = None

    def has(self, role: str) -> bool:
        return self.entry is not None and role in self.entry.roles


@dataclass(frozen=True)
class Site:
    """The input of an operation: the cluster file, the workspace, and all nodes.

    left: the nodes that are left out from now on, because an operation failed on them, and why.
    """

    cluster: Cluster
    workspace: Workspace
    targets: list[Target]
    left: dict[str, str] = field(default_factory=dict)

    def with_role(self, role: str) -> list[Target]:
        return [target for target in self.targets if target.has(role)]

    @property
    def standing(self) -> list[Target]:
        """The nodes that are not in `left`."""
        return [target for target in self.targets if target.node.name not in self.left]

    def told(self, fact: Fact[T]) -> list[tuple[Target, T]]:
        """The answers of the nodes that are not in `left`; a node that does not answer is left out, and fails later."""
        found = []
        for one in self.standing:
            with contextlib.suppress(Unanswered):
                found.append((one, one.facts[fact]))
        return found

    def absent(self, role: str | None = None) -> list[str]:
        """The names of the nodes in `left`, all or with a role."""
        return [one.node.name for one in self.targets if one.node.name in self.left and (role is None or one.has(role))]


class Change(Protocol):
    """One step. says: the sentence that `plan` prints. command: the command that is run for it. make: carries it out.

    make raises Unanswered if the change failed.
    """

    @property
    def says(self) -> str: ...
    @property
    def command(self) -> str: ...
    def make(self, node: Node) -> None: ...


@dataclass(frozen=True)
class Here:
    """A change that this program itself makes, on this machine."""

    says: str
    do: Callable[[], object]
    command: str = ""

    def make(self, node: Node) -> None:
        self.do()


@dataclass(frozen=True)
class Run:
    """A command on the node, as root. stdin: its input, which other users of the node cannot read, unlike argv."""

    says: str
    argv: Sequence[str]
    timeout_s: float = 60.0
    stdin: bytes = field(default=b"", repr=False)

    @property
    def command(self) -> str:
        return shlex.join(self.argv)

    def make(self, node: Node) -> None:
        answer = node.run(self.argv, timeout_s=self.timeout_s, stdin=self.stdin, root=True)
        if answer.code is None:
            raise _failed(node, f"{self.says}: it did not end within {self.timeout_s:g} s")
        if answer.code != 0:
            raise _failed(node, f"{self.says}: {reason(answer)}")


@dataclass(frozen=True)
class On:
    """A change on another node than the target, for an operation that is done once for all nodes."""

    node: Node
    change: Change

    @property
    def says(self) -> str:
        return self.change.says

    @property
    def command(self) -> str:
        return self.change.command

    def make(self, node: Node) -> None:
        self.change.make(self.node)


@dataclass(frozen=True)
class Write:
    """A file on the node, which is replaced completely or not at all."""

    says: str
    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644
    owner: str = "root:root"

    @property
    def command(self) -> str:
        return f"install -m {self.mode:o} -o {self.owner.replace(':', ' -g ')} ({len(self.content)} bytes) {self.path}"

    def make(self, node: Node) -> None:
        answer = node.put(self.content, self.path, mode=self.mode, owner=self.owner)
        if answer.code != 0:
            raise _failed(node, f"{self.says}: {reason(answer)}")


def _failed(node: Node, why: str) -> Unanswered:
    said = f"{node.name}: {why}"
    return Unanswered(said, {node.name: said})


def reason(answer: Answer) -> str:
    """Why a command failed. apt and pip report a full disk long before their last line."""
    full = next((line.strip() for line in f"{answer.stderr}\n{answer.stdout}".splitlines() if _FULL.search(line)), None)
    if full is None:
        return last_line(answer)
    return f"a disk is full: {full}; free some space on it and run the same command again"


def shell(says: str, script: str, *, timeout_s: float = 60.0, stdin: bytes = b"") -> Run:
    """A script of several commands, which ends at the first that fails."""
    return Run(says, ["sh", "-euc", script], timeout_s, stdin)


@dataclass(frozen=True)
class Nothing:
    """Why there is nothing to change."""

    why: str


@dataclass(frozen=True)
class Operation:
    """An operation. name: for --only and --skip. plan: returns what has to change on a node. once: one plan for all nodes
    together, made with the first of them."""

    name: str
    plan: Callable[[Site, Target], Sequence[Change] | Nothing]
    once: bool = False
