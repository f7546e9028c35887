"""Providers of nodes, one per file: each returns the nodes of a cluster and runs commands on them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardlab.remote import Answer

__all__ = ["STOPPING", "Answer", "Node"]

STOPPING = threading.Event()  # set when this process is interrupted: from then on no node starts a command


class Node(Protocol):
    """One machine of a cluster. `host`, `port` and `user` say how it is reached; None where nobody has to log in."""

    name: str
    host: str
    port: int | None
    user: str | None
    identity: Path | None  # the private key's file
    python: str  # the interpreter that has shardlab installed, on that machine
    wheelhouse: str | None  # a folder of wheels on it, from which pip installs everything; None: pip uses its index

    @property
    def running(self) -> tuple[str, ...]:
        """The beginnings of the commands that run there now."""
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
        """Write a file as root, completely or not at all. owner: as for chown. Raises Unreachable."""
        ...
