"""The interface of a node: a machine of the cluster on which commands run and files are written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Required, TypedDict, Unpack

import msgspec

from shardlab.remote.remote import CommandOutput


class RunOptions(TypedDict, total=False):
    """The options of `Node.run`. All but `timeout_s` may be left out."""

    timeout_s: Required[float]
    """The command is ended after this time."""
    env: Mapping[str, str] | None
    """Variables that are added to the environment."""
    stdin: bytes
    """The input of the command; a secret is passed here, because other users can read `argv`."""
    root: bool
    """Run the command by `sudo -n`, which never asks for a password."""
    secret: bool
    """The output of the command is a secret, which no log may contain."""


class Node(msgspec.Struct, eq=False):
    """One machine of a cluster. `host`, `port` and `user` are for the login; `port` and `user` may be None."""

    name: str
    host: str
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    """The file of the private key for the login; None: SSH chooses a key."""
    python: str = "python3"
    """The Python interpreter on this machine that has shardlab installed."""
    wheelhouse: str | None = None
    """A folder of wheels on this machine, from which pip installs; None: pip uses its index."""
    may_sudo: bool = True
    """False: no command runs as root on this machine; an administrator has to make changes that need root."""
    venv_python: str = "python3"
    """The Python interpreter on this machine that creates the virtual environment."""
    own_address: str | None = None
    """The address on the network on which the nodes train; None: `host`."""
    variables: dict[str, str] = {}
    """Environment variables of each command on this machine."""

    @property
    def address(self) -> str:
        """The node's address on the network on which the nodes train; often the same as `host`."""
        return self.own_address or self.host

    @property
    @abstractmethod
    def running(self) -> tuple[str, ...]:
        """The beginnings of the commands that this program runs on the node now."""

    @abstractmethod
    def end_commands(self, limit_s: float) -> None:
        """End the commands in `running`. Commands that are still in `running` after `limit_s` seconds could not be ended."""

    @abstractmethod
    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> CommandOutput:
        """Run the command `argv` on the node, without a shell. Raises Unreachable."""

    @abstractmethod
    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file on the node, completely or not at all. Raises Unreachable.

        owner: USER:GROUP, as for chown, and root writes the file; empty: the user who logs in writes the file.
        """


def find_error_line(command_output: CommandOutput) -> str:
    """The last line of a failed command's standard error; its exit status if it wrote no error."""
    error_lines = [error_line.strip() for error_line in command_output.stderr.splitlines() if error_line.strip()]
    return error_lines[-1] if error_lines else f"exit status {command_output.code}"
