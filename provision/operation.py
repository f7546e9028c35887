"""The interface of an operation: it reads facts and returns the changes that a node needs, or why it needs none."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from provision.fact import FactAnswers, FactQuery, Unanswered
from provision.node import Node, find_error_line
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace

T = TypeVar("T")
HERE_DOCUMENT_END = "END-OF-SHARDLAB"  # the line that ends a here-document in a script for an administrator
_NO_NETWORK = re.compile("Temporary failure (in name resolution|resolving)|Name or service not known|Network is unreachable")
_DISK_FULL = re.compile("No space left on device|Disk quota exceeded|enough free space")


class Target(msgspec.Struct, frozen=True):
    """A node on which operations and checks work, with its facts."""

    node: Node
    facts: FactAnswers
    node_entry: NodeEntry | None = None
    """The entry of the node in the cluster file; None for this machine (provider local)."""
    environments: dict[str, Target] = {}
    """The same node with the interpreter of each further environment of the cluster file, by the name of the environment."""

    def forget_facts(self) -> None:
        """Forget all answers of the node, because a change may have made them wrong."""
        for target in (self, *self.environments.values()):
            target.facts.forget_answers()

    def has_role(self, role: str) -> bool:
        """Whether the cluster file gives this node the role `role`."""
        return self.node_entry is not None and role in self.node_entry.roles


class Site(msgspec.Struct, frozen=True):
    """The input of an operation: the cluster file, the workspace, and all nodes."""

    cluster: Cluster
    workspace: Workspace
    targets: list[Target]
    skipped: dict[str, str] = {}
    """The nodes that later operations and checks skip: name of the node -> reason."""
    is_pretended: bool = False
    """True: a file describes the nodes (option --pretend), and no node is reached."""
    waiting_operations_by_node: dict[str, list[str]] = {}
    """By node: the operations that an administrator has to carry out on it."""
    environment_name: str | None = None
    """The name of the further environment whose interpreter the targets have; None: the default environment."""

    def select_environment(self, name: str) -> Site:
        """This site with the keys and the interpreters of a further environment of the cluster file."""
        targets = [target.environments[name] for target in self.targets]
        return msgspec.structs.replace(self, cluster=self.cluster.for_environment(name), targets=targets, environment_name=name)

    def list_environments(self, target: Target) -> list[tuple[Site, Target]]:
        """The site and the node `target` in each environment of the cluster file; the default environment comes first. Further
        environments with equal keys have the same interpreter, so that only the first of them is listed."""
        members = {target.node.python: (self, target)}
        for environment_name, environment_target in target.environments.items():
            members.setdefault(environment_target.node.python, (self.select_environment(environment_name), environment_target))
        return list(members.values())

    @property
    def is_practice(self) -> bool:
        """Whether the nodes are practice nodes, which share a folder with this machine and have devices in place of GPUs."""
        return self.cluster.provider == "virtual"

    def list_with_role(self, role: str) -> list[Target]:
        """All nodes with the role `role`, also the nodes that are in `skipped`."""
        return [target for target in self.targets if target.has_role(role)]

    @property
    def active_targets(self) -> list[Target]:
        """The nodes that later operations and checks do not skip, which are the nodes that are not in `skipped`."""
        return [target for target in self.targets if target.node.name not in self.skipped]

    def collect_answers(self, fact: FactQuery[T]) -> list[tuple[Target, T]]:
        """The nodes that answer the question `fact`, each with its answer, without the nodes in `skipped`."""
        target_answers = []
        for target in self.active_targets:
            with contextlib.suppress(Unanswered):
                target_answers.append((target, target.facts[fact]))
        return target_answers

    def list_absent_names(self, role: str | None = None) -> list[str]:
        """The names of the nodes in `skipped`; with `role`, only of the nodes that have this role."""
        return [
            target.node.name
            for target in self.targets
            if target.node.name in self.skipped and (role is None or target.has_role(role))
        ]


class Change(Protocol):
    """One change that an operation makes on a node, such as a command or a file."""

    @property
    def description(self) -> str:
        """The sentence that `plan` prints."""
        ...

    @property
    def command(self) -> str:
        """The command that makes this change, as text; empty if no command is run."""
        ...

    @property
    def script(self) -> str:
        """The commands by which an administrator makes this change as root; empty if the change does not need root."""
        ...

    def make(self, node: Node) -> None:
        """Make this change. Raises Unanswered if it failed."""
        ...


class LocalCall(msgspec.Struct, frozen=True):
    """A change that this program makes itself, on this machine, by calling the function `call`."""

    description: str
    call: Callable[[], object]
    command: str = ""
    script: str = ""
    """The commands by which an administrator makes the change, if it needs root."""

    def __repr__(self) -> str:  # the text does not contain the arguments of `call`, which may be secret
        return f"LocalCall({self.description!r})"

    def make(self, node: Node) -> None:
        self.call()


class RunCommand(msgspec.Struct, frozen=True):
    """A change by a command on the node."""

    description: str
    argv: Sequence[str]
    timeout_s: float = 60.0
    stdin: bytes = b""
    """The command's input, which other users cannot read; they can read `argv`."""
    root: bool = True

    def __repr__(self) -> str:  # the text does not contain stdin, which may be a secret
        return f"RunCommand({self.description!r}, {self.argv!r}, {self.timeout_s!r})"

    @property
    def command(self) -> str:
        return shlex.join(self.argv)

    @property
    def script(self) -> str:
        if not self.root:
            return ""
        is_shell = list(self.argv[:2]) == ["sh", "-euc"] and len(self.argv) == 3
        command_text = f"(\nset -eu\n{self.argv[2].rstrip()}\n)" if is_shell else shlex.join(self.argv)
        return f"{command_text} {_make_here_document(self.stdin)}" if self.stdin else command_text

    def make(self, node: Node) -> None:
        command_output = node.run(self.argv, timeout_s=self.timeout_s, stdin=self.stdin, root=self.root)
        if command_output.code is None:
            raise _make_unanswered(node, f"{self.description}: it did not end within {self.timeout_s:g} s")
        if command_output.code != 0:
            raise _make_unanswered(node, f"{self.description}: {failure_reason(command_output)}")


class ChangeOnNode(msgspec.Struct, frozen=True):
    """A change on the node `node` instead of the operation's target, for an operation that is planned once for all nodes, or
    for several environments."""

    node: Node
    change: Change
    description_prefix: str = ""
    """The begin of the description."""

    @property
    def description(self) -> str:
        return f"{self.description_prefix}{self.change.description}"

    @property
    def command(self) -> str:
        return self.change.command

    @property
    def script(self) -> str:
        return ""  # no script is needed: Slurm is set up only on nodes with sudo, and environments are made without root

    def make(self, node: Node) -> None:
        self.change.make(self.node)


class Write(msgspec.Struct, frozen=True):
    """A change that writes a file on the node, completely or not at all."""

    description: str
    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root:root"
    """USER:GROUP, as for chown, and root writes the file; empty: the user who logs in writes the file."""

    def __repr__(self) -> str:  # the text does not contain the content of the file, which may be long
        return f"Write({self.description!r}, {self.path!r}, {self.mode:o}, {self.owner!r})"

    @property
    def command(self) -> str:
        owner_options = f" -o {self.owner.replace(':', ' -g ')}" if self.owner else ""
        return f"install -m {self.mode:o}{owner_options} ({len(self.content)} bytes) {self.path}"

    @property
    def script(self) -> str:
        if not self.owner:  # an empty owner: the user writes the file without root
            return ""
        owner, _, group = self.owner.partition(":")
        install_words = ["install", "-D", "-m", f"{self.mode:o}", "-o", owner, *(["-g", group] if group else [])]
        return f"{shlex.join([*install_words, '/dev/stdin', self.path])} {_make_here_document(self.content)}"

    def make(self, node: Node) -> None:
        command_output = node.put(self.content, self.path, mode=self.mode, owner=self.owner)
        if command_output.code != 0:
            raise _make_unanswered(node, f"{self.description}: {failure_reason(command_output)}")


def _make_here_document(document_bytes: bytes) -> str:
    """The input of a command in a shell script, as a here-document. document_bytes: text of a file that root writes."""
    document_text = document_bytes.decode()
    return f"<<'{HERE_DOCUMENT_END}'\n{document_text}{'' if document_text.endswith(chr(10)) else chr(10)}{HERE_DOCUMENT_END}"


def _make_unanswered(node: Node, reason: str) -> Unanswered:
    message = f"{node.name}: {reason}"
    return Unanswered(message, {node.name: message})


def failure_reason(command_output: CommandOutput) -> str:
    """Why a command failed: a full disk if its output reports one, otherwise the last line of its standard error.

    apt and pip report a full disk, and that no network answers, long before their last line.
    """
    full_disk_line = next(
        (line.strip() for line in f"{command_output.stderr}\n{command_output.stdout}".splitlines() if _DISK_FULL.search(line)),
        None,
    )
    if full_disk_line is None:
        network_match = _NO_NETWORK.search(command_output.stderr)
        return find_error_line(command_output) + (f"; before that: {network_match[0]}" if network_match else "")
    return f"a disk is full: {full_disk_line}; free some space on it and run the same command again"


def shell_change(sentence: str, script: str, *, timeout_s: float = 60.0, stdin: bytes = b"", root: bool = True) -> RunCommand:
    """A change by a shell script on the node. The script ends at the first command that fails."""
    return RunCommand(sentence, ["sh", "-euc", script], timeout_s, stdin, root)


class Nothing(msgspec.Struct, frozen=True):
    """The result of an operation that has nothing to change on a node."""

    why: str
    """The reason."""


PlanFunction = Callable[[Site, Target], Sequence[Change] | Nothing]


def plan_each_environment(plan_environment: PlanFunction) -> PlanFunction:
    """The plan of an operation for all environments of the cluster file. plan_environment: the plan for one environment."""

    def plan_all(site: Site, target: Target) -> Sequence[Change] | Nothing:
        changes, reasons = list[Change](), list[str]()
        for environment_site, environment_target in site.list_environments(target):
            environment_name = environment_site.environment_name
            description_prefix = "" if environment_name is None else f"environment {environment_name}: "
            environment_plan = plan_environment(environment_site, environment_target)
            if isinstance(environment_plan, Nothing):
                reasons.append(f"{description_prefix}{environment_plan.why}")
            else:
                changes += [
                    ChangeOnNode(environment_target.node, change, description_prefix) if description_prefix else change
                    for change in environment_plan
                ]
        return changes or Nothing("; ".join(reasons))

    return plan_all


class Operation(msgspec.Struct, frozen=True):
    """Something that `provision` makes true on each node, such as a mounted folder. The options --only and --skip choose
    operations by their names."""

    name: str
    plan: PlanFunction
    """Returns the changes that a node needs."""
    once: bool = False
    """True: one plan is made for all nodes together, with the first node as its target."""
    written_paths: tuple[str, ...] = ()
    """Paths of the files that the operation writes; the fact FILES reports only these."""
