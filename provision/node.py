"""The interface of a node: a machine of the cluster on which commands run and files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardlab.remote import CommandOutput


class Node(Protocol):
    """One machine of a cluster. `host`, `port` and `user` are for the login; None where nobody has to log in."""

    name: str
    host: str
    port: int | None
    user: str | None
    identity: Path | None  # the private key's file
    python: str  # the interpreter that has shardlab installed, on that machine
    wheelhouse: str | None  # a folder of wheels on it, from which pip installs everything; None: pip uses its index
    may_sudo: bool  # False: no command runs as root there; an administrator has to do what needs root
    venv_python: str  # the interpreter from which its environment is made, on that machine

    @property
    def address(self) -> str:
        """On the network on which the nodes train; often the same as `host`."""
        ...

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
    ) -> CommandOutput:
        """Run `argv` there, without a shell, with `env` on top of the environment; ended after `timeout_s` seconds.

        root: by `sudo -n`, which never asks. A secret goes in through stdin; secret: what comes out is one, for no log.
        Raises Unreachable.
        """
        ...

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file as root, completely or not at all. owner: as for chown; empty: the user who logs in writes the file.

        Raises Unreachable.
        """
        ...


def last_line(answer: CommandOutput) -> str:
    """The last line of a failed command's standard error, or its exit status if there is none."""
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {answer.code}"
