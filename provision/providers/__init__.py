"""Where nodes come from: each file turns a cluster into its nodes and knows how a command is run on one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardlab.remote import Answer

__all__ = ["STOPPING", "Answer", "Node"]

STOPPING = threading.Event()  # set once this process was told to end: from then on no node starts a command


class Node(Protocol):
    """One machine of a cluster. `host`, `port` and `user` say how it is reached; None where nobody has to log in."""

    name: str
    host: str
    port: int | None
    user: str | None
    identity: Path | None  # the private key's file
    python: str  # the interpreter that has shardlab installed, on that machine
    wheelhouse: str | None  # a folder of wheels on it that pip has to take everything from

    @property
    def running(self) -> tuple[str, ...]:
        """The commands that run there now, by their first word."""
        ...

    def end(self, limit_s: float) -> None:
        """End the commands that run there; those still in `running` after `limit_s` seconds could not be ended."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        root: bool = False,
        secret: bool = False,
    ) -> Answer:
        """Run `argv` there, without a shell, with `env` on top of the environment; ended after `timeout_s` seconds.

        root: by `sudo -n`, which never asks. A secret goes in through stdin; secret: what comes out is one, for no log.
        Raises Unreachable.
        """
        ...

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> Answer:
        """Make the file `path` hold `content`, by root, all of it or nothing; owner as chown takes it. Raises Unreachable."""
        ...
