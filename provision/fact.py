"""The interface of a fact: a command that runs on a node, and a pure function that parses its output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from provision.node import Node, find_error_line
from shardlab.errors import ShardlabError
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.remote.remote import Unreachable

T = TypeVar("T")
_NOT_ASKED = object()  # stands for a question that was not asked yet; None is not used for this, because None may be an answer


class Unanswered(ShardlabError):
    """A node did not answer a question, gave an answer that cannot be parsed, or did not carry out a change.

    reasons_by_node: the names of the nodes at fault, each with the reason; empty if they are not known. An operation on one
    node may ask another node, so the node at fault can be a different node than the node that the operation changes.
    """

    def __init__(self, message: str, reasons_by_node: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons_by_node = dict(reasons_by_node or {})


class FactQuery(msgspec.Struct, Generic[T], frozen=True):
    """A question to a node: the command that asks it, and the function that parses the output of the command."""

    name: str
    command: Callable[[str], list[str]]
    """Its argument: the path of the node's Python interpreter."""
    parse: Callable[[str], T]
    """Raises ValueError if the output is wrong."""
    timeout_s: float
    root: bool = False
    takes_paths: bool = False
    """True: the paths of the files that operations write are appended to the command."""


class FactAnswers:
    """The answers of one node. Each question is asked once, when its answer is first needed.

    file_paths: the paths of the files that operations write. The command of a fact with `takes_paths` gets these paths.
    """

    def __init__(self, node: Node, file_paths: Sequence[str] = ()) -> None:
        self.node, self.file_paths = node, file_paths
        self.answers: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}

    def __getitem__(self, fact: FactQuery[T]) -> T:
        """The answer of the node to the question `fact`. Raises Unanswered."""
        answer: Any = self.answers.get(fact.name, _NOT_ASKED)
        if answer is _NOT_ASKED:
            # The lock makes another thread that asks the same question wait for this answer.
            with self._locks.setdefault(fact.name, threading.Lock()):
                answer = self.answers.get(fact.name, _NOT_ASKED)
                if (
                    answer is _NOT_ASKED
                ):  # the local variable `answer` is returned even if another thread calls forget_answers() now
                    answer = self.answers[fact.name] = self._ask(fact)
        if isinstance(answer, Unanswered):
            raise answer
        typed_answer: T = answer
        return typed_answer

    def forget_answers(self) -> None:
        """Forget all answers, because a change may have made them wrong."""
        self.answers.clear()

    def _ask(self, fact: FactQuery[T]) -> T | Unanswered:
        node_name = self.node.name

        def make_unanswered(reason: str) -> Unanswered:
            return Unanswered(reason, {node_name: reason})

        try:
            argv = [*fact.command(self.node.python), *(self.file_paths if fact.takes_paths else ())]
            command_output = self.node.run(argv, timeout_s=fact.timeout_s, root=fact.root and self.node.may_sudo)
        except Unreachable as error:
            return make_unanswered(str(error))
        fact_phrase = f"{node_name}: the fact {fact.name!r}"
        if command_output.code is None:
            return make_unanswered(f"{fact_phrase} was not answered within {fact.timeout_s:g} s; the machine may be overloaded")
        if command_output.code != 0:
            return make_unanswered(f"{fact_phrase} is not known, as its command failed: {find_error_line(command_output)}")
        try:
            return fact.parse(command_output.stdout)
        except ValueError as error:
            return make_unanswered(f"{fact_phrase} cannot be read: {error}")


def decode_last_line(stdout: str, target_type: type[T]) -> T:
    """Decode the last line of `stdout`, which is JSON of the type `target_type`; libraries may print banners before this line.

    Raises ValueError.
    """
    filled_lines = [line for line in stdout.splitlines() if line.strip()]
    if not filled_lines:
        raise ValueError("it printed nothing.")
    try:
        return get_decoder(target_type).decode(filled_lines[-1])
    except (*DECODE_FAULTS, UnicodeEncodeError) as error:
        raise ValueError(f"{error}, in {filled_lines[-1][:80]!r}.") from None
