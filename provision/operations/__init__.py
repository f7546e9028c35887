"""One thing to make true per file: it reads facts and says what to change, or why there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provision.facts import Facts
from provision.providers import Node
from shardlab.cluster import Cluster
from shardlab.workspace import Workspace


@dataclass(frozen=True)
class Target:
    """A node and what it has answered."""

    node: Node
    facts: Facts


@dataclass(frozen=True)
class Site:
    """What an operation may look at: the cluster as written, where notes are kept, and all nodes."""

    cluster: Cluster
    workspace: Workspace
    targets: list[Target]


@dataclass(frozen=True)
class Change:
    """One step: the sentence that `plan` prints and `apply` then makes true."""

    says: str
    make: Callable[[], object]


@dataclass(frozen=True)
class Nothing:
    """Why there is nothing to change."""

    why: str


@dataclass(frozen=True)
class Operation:
    """A name for --only and --skip, and the question what has to change on a node."""

    name: str
    plan: Callable[[Site, Target], list[Change] | Nothing]
