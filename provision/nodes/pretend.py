"""Nodes that a file describes (option --pretend), so that a plan can be shown without machines. No command runs on a node.

The file is a document of `provision plan --json` or `provision facts --json`; names, facts and addresses of the nodes are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, Unpack, get_type_hints

import msgspec

from provision.fact import FactAnswers, FactQuery, Unanswered
from provision.facts.addresses import ADDRESSES
from provision.node import Node, RunOptions
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.remote.remote import CommandOutput, Unreachable

T = TypeVar("T")
NULL_JSON = msgspec.Raw(b"null")


class DescribedMachine(msgspec.Struct, frozen=True):
    """A node in the file."""

    name: str
    facts: dict[str, msgspec.Raw] = {}
    """The JSON of each answer, by the name of the fact."""
    addresses: msgspec.Raw = NULL_JSON
    """The JSON of the answer to the fact ADDRESSES; null if the node did not answer."""


class DescribedMachines(msgspec.Struct, frozen=True):
    """The part of the file of --pretend that is read: its nodes."""

    nodes: list[DescribedMachine]


class PretendedNode(Node, eq=False):
    """A node of the cluster file that the file of --pretend describes. It runs no commands."""

    running: tuple[str, ...] = ()

    def end_commands(self, limit_s: float) -> None:
        """Does nothing, because no command runs on this node."""

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> CommandOutput:
        """Always raises Unreachable: no command runs on a pretended node."""
        raise self._make_unreachable_error()

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Always raises Unreachable: no file is written on a pretended node."""
        raise self._make_unreachable_error()

    def _make_unreachable_error(self) -> Unreachable:
        unreachable_error = Unreachable(f"{self.name}: with --pretend, no command is run on this machine.")
        unreachable_error.node = self.name
        return unreachable_error


class PretendedFacts(FactAnswers):
    """The answers of a node, taken from a file. An answer in the file that has the wrong type raises InputError."""

    def __init__(self, node: Node, facts_path: Path, described_machine: DescribedMachine) -> None:
        super().__init__(node)
        self._facts_path = facts_path
        self._described_answers = dict(described_machine.facts)
        if described_machine.addresses != NULL_JSON:
            self._described_answers.setdefault(ADDRESSES.name, described_machine.addresses)

    def _ask(self, fact: FactQuery[T]) -> T | Unanswered:
        node_name = self.node.name
        if fact.name not in self._described_answers:
            missing_reason = f"{node_name}: {self._facts_path} does not have the fact {fact.name!r}"
            return Unanswered(missing_reason, {node_name: missing_reason})
        answer_type: type[T] = get_type_hints(fact.parse)["return"]
        try:
            return get_decoder(answer_type).decode(self._described_answers[fact.name])
        except DECODE_FAULTS as error:
            raise InputError(f"{self._facts_path}: node {node_name}: the fact {fact.name!r}: {error}.") from None


def read_pretended_facts(path: Path, nodes: Sequence[Node]) -> list[FactAnswers]:
    """The answers of each node of the cluster, as the file describes them. Raises InputError."""
    try:
        described_machines = get_decoder(DescribedMachines).decode(files.read(path)).nodes
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Allowed: a document of provision plan --json.") from None
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: {error}. Allowed: a document of provision plan --json.") from None
    machine_by_name = {machine.name: machine for machine in described_machines}
    names = [node.name for node in nodes]
    if sorted(machine.name for machine in described_machines) != sorted(names):
        machine_names = ", ".join(machine.name for machine in described_machines) or "no node"
        raise InputError(f"{path}: describes {machine_names}. Allowed: each node of the cluster file once: {', '.join(names)}.")
    pretended_nodes = (PretendedNode(*(getattr(node, field) for field in Node.__struct_fields__)) for node in nodes)
    return [PretendedFacts(node, path, machine_by_name[node.name]) for node in pretended_nodes]
