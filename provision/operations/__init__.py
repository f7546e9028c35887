"""One thing to make true per file: it reads facts and says what to change, or why there is nothing to do."""

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
    """A node and what it has answered. entry: what the cluster file says of it, None for this machine itself."""

    node: Node
    facts: Facts
    entry: Entry | None = None

    def has(self, role: str) -> bool:
        return self.entry is not None and role in self.entry.roles


@dataclass(frozen=True)
class Site:
    """What an operation may look at: the cluster as written, where notes are kept, and all nodes.

    left: the nodes of which nothing more is asked, because an operation failed on them, and why.
    """

    cluster: Cluster
    workspace: Workspace
    targets: list[Target]
    left: dict[str, str] = field(default_factory=dict)

    def with_role(self, role: str) -> list[Target]:
        return [target for target in self.targets if target.has(role)]

    @property
    def standing(self) -> list[Target]:
        """Those that are not left."""
        return [target for target in self.targets if target.node.name not in self.left]

    def told(self, fact: Fact[T]) -> list[tuple[Target, T]]:
        """What the nodes that stand say; one that does not answer stops nobody but itself, at its own turn."""
        found = []
        for one in self.standing:
            with contextlib.suppress(Unanswered):
                found.append((one, one.facts[fact]))
        return found

    def absent(self, role: str | None = None) -> list[str]:
        """The names of those that are left, all or with a role."""
        return [one.node.name for one in self.targets if one.node.name in self.left and (role is None or one.has(role))]


class Change(Protocol):
    """One step: `says` is the sentence that `plan` prints, `command` what is run for it, and `make` makes it true.

    make raises Unanswered where the node did not do it.
    """

    @property
    def says(self) -> str: ...
    @property
    def command(self) -> str: ...
    def make(self, node: Node) -> None: ...


@dataclass(frozen=True)
class Here:
    """Something done by this program itself, on this machine."""

    says: str
    do: Callable[[], object]
    command: str = ""

    def make(self, node: Node) -> None:
        self.do()


@dataclass(frozen=True)
class Run:
    """A command on the node, by root. stdin: what everybody there may not read."""

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
    """A change of another node than the one that is asked, for what is done once for all."""

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
    """A file on the node, replaced whole or not at all."""

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
    """Why a command failed; of a full disk apt and pip speak long before their last line."""
    full = next((line.strip() for line in f"{answer.stderr}\n{answer.stdout}".splitlines() if _FULL.search(line)), None)
    if full is None:
        return last_line(answer)
    return f"a disk of it is full: {full}; make room there, and run the same command again"


def shell(says: str, script: str, *, timeout_s: float = 60.0, stdin: bytes = b"") -> Run:
    """A script of several commands, which ends at the first that fails."""
    return Run(says, ["sh", "-euc", script], timeout_s, stdin)


@dataclass(frozen=True)
class Nothing:
    """Why there is nothing to change."""

    why: str


@dataclass(frozen=True)
class Operation:
    """A name for --only and --skip, and the question what has to change on a node. once: for all nodes together, asked of
    the first of them."""

    name: str
    plan: Callable[[Site, Target], Sequence[Change] | Nothing]
    once: bool = False
