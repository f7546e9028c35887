"""The interface of a provider: where the nodes of a cluster come from, and what provisioning does with them.

Each provider is a file in provision/providers that defines `PROVIDER`; the provider has the name of the file. If its
machines already exist and all operations apply to them, a provider states only its name, its origin and its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from provision.node import Node
from provision.operation import Change, Nothing
from shardlab import registry
from shardlab.cluster.cluster import Cluster
from shardlab.workspace.workspace import Workspace

NodeT = TypeVar("NodeT", bound=Node)

NOTHING_TO_DO: dict[str, str] = {  # by verb: the sentence for the user if a provider has no function for the verb
    "request": "provider {name} has nothing to request: {origin}.",
    "profile": "provider {name} has nothing to request: {origin}.",
    "warm": "provider {name} has nothing to prepare in advance.",
    "extend": "provider {name} has nothing to extend: {origin}.",
    "down": "provider {name}: provision created no machine, so there is nothing to undo.",
}


class MachinesToCreate(msgspec.Struct, frozen=True):
    """Machines that do not exist yet."""

    request_lines: list[str]
    """Lines of text on what would be requested;."""
    request: dict[str, Any]
    """The same as JSON;."""
    blocked: str | None = None
    """Why they cannot be created now, as a sentence; None if they can."""


class Confirmation(msgspec.Struct, frozen=True):
    """What the user has to confirm before `down`."""

    name: str
    """The name that the user types;."""
    loss_sentences: list[str]
    """Sentences on what is then lost."""


def user_lock_paths(cluster: Cluster) -> list[Path]:
    """The lock file for a cluster name. All workspaces of this user use the same lock file for this name."""
    return [Path.home() / ".cache" / "shardlab" / "locks" / f"{cluster.name}.lock"]


def _report_existing(cluster: Cluster, workspace: Workspace, node: Any) -> Nothing:
    return Nothing("this machine already exists")


class Provider(msgspec.Struct, Generic[NodeT], frozen=True):
    """A provider, which the key `provider` in cluster.yaml chooses by its name."""

    name: str
    """The name of the provider's file in provision/providers, without .py."""
    origin: str
    """A clause that says where the machines of the provider come from, such as `its machines already exist`."""
    nodes: Callable[[Cluster, Workspace], Sequence[NodeT]]
    """Returns the nodes of the cluster, whether they are up or not. Opens no connection."""
    locks: Callable[[Cluster], list[Path]] = user_lock_paths
    """Returns the files that a command locks while it changes the cluster, besides the lock of the workspace. Raises
    WorkspaceError."""
    bring_up: Callable[[Cluster, Workspace, NodeT], Sequence[Change] | Nothing] = _report_existing
    """Returns the changes of the first operation on a node, after which a user can log in to the node; Nothing if no change is
    needed. Raises ShardlabError."""
    request: Callable[[Cluster, Workspace], str] | None = None
    """Returns the text with which a person requests the machines from the provider."""
    profile: Callable[[Cluster, Workspace], str] | None = None
    """Returns the same request as a script that the provider executes (a profile of CloudLab)."""
    warm: Callable[[Cluster, Workspace], str] | None = None
    """Makes in advance what takes long when the first node is created. Returns a sentence that says what is ready."""
    down: Callable[[Cluster, Workspace], str] | None = None
    """Removes the machines that provision created. Returns a sentence that says what was removed."""
    present: Callable[[Cluster, Workspace], Cluster | MachinesToCreate] | None = None
    """For providers whose cluster file may list no nodes. Returns the cluster with its nodes, or the machines that `obtain`
    would create. Contacts no other machine and stores nothing. Raises ShardlabError."""
    obtain: Callable[[Cluster, Workspace], None] | None = None
    """Creates the machines if they do not exist, and stores in the workspace the files from which the nodes are known when the
    cluster file is read again. If the machines exist, reads again until when they are lent. Raises ShardlabError."""
    extend: Callable[[Cluster, Workspace, int | None, str | None], str] | None = None
    """Asks the provider to lend the machines for more hours, with a reason. Returns a sentence that says what was granted.
    Raises ShardlabError."""
    confirmation: Callable[[Cluster, Workspace], Confirmation | None] | None = None
    """Returns what the user has to confirm before `down` removes machines; None: the user has to confirm nothing."""
    operations: frozenset[str] | None = None
    """The names of the operations that apply to the provider's nodes; provision/order.py has their order. None: all operations
    except those in ONLY_NAMED of provision/order.py."""
    checks: frozenset[str] | None = None
    """The names of the checks that apply to the provider's nodes; None: all checks except those in ONLY_NAMED of
    provision/order.py."""
    additional: frozenset[str] = frozenset()
    """The names of operations and checks that apply to the provider's nodes in addition to `operations` and `checks`."""

    def carry_out_verb(
        self, verb: str, cluster: Cluster, workspace: Workspace, hours: int | None = None, reason: str | None = None
    ) -> str:
        """Carry out the verb request, profile, warm, extend or down. Returns the text for the user. Raises ShardlabError.

        hours, reason: for how many more hours `extend` asks, and why; the other verbs do not use them.
        """
        if verb == "extend" and self.extend is not None:
            return self.extend(cluster, workspace, hours, reason)
        function_by_verb = {
            "request": self.request,
            "profile": self.profile,
            "warm": self.warm,
            "extend": None,
            "down": self.down,
        }
        verb_function = function_by_verb[verb]
        if verb_function is None:
            return NOTHING_TO_DO[verb].format(name=self.name, origin=self.origin)
        return verb_function(cluster, workspace)


def find_provider(name: str) -> Provider[Any]:
    """The provider of this name. Raises UnknownName."""
    plugin: Provider[Any] = registry.load_plugin("provision.providers", name, "provider").PROVIDER
    return plugin
