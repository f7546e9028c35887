"""Where nodes come from: each file turns a cluster into its nodes and knows how a command is run on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """What a command gave back. `code` is its exit status (negative: minus the signal), None if it ran past its limit."""

    code: int | None
    stdout: str
    stderr: str


class Node(Protocol):
    """One machine of a cluster. `host`, `port` and `user` say how it is reached; None where nobody has to log in."""

    name: str
    host: str
    port: int | None
    user: str | None
    python: str  # the interpreter that has shardlab installed, on that machine

    def run(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Answer:
        """Run `argv` there, without a shell, with `env` on top of the environment; ended after `timeout_s` seconds."""
        ...
