"""A workspace whose runs are on a cluster: where they lie there, and how its commands are run there.

The runs of a cluster lie on its shared storage, where its nodes read and write them, in a workspace of their own; the
commands that send and watch them run on its controller, where Slurm is. What this side keeps is the cluster file, the
matrices that a person wrote, and in .shardlab/away.json where all else is.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import Any

import msgspec

from shardlab import files, inventory, relay
from shardlab.cluster import Cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.remote import Address, HostKeys, ssh_command
from shardlab.workspace import Workspace

LIMIT_S = 120.0
MARK = ".away"  # a file of the workspace there: by what it says this side knows that it sees the very same folder
LOST = 255  # ssh's own exit code where there is no connection


class Away(msgspec.Struct, frozen=True):
    """.shardlab/away.json. workspace: the folder on the cluster, mark: whose it is; python: the interpreter there that has
    shardlab."""

    schema: int
    cluster: str
    host: str
    port: int | None
    user: str | None
    identity: str | None
    known_hosts: str
    host_keys: HostKeys
    python: str
    workspace: str
    mark: str

    @property
    def address(self) -> Address:
        identity = Path(self.identity) if self.identity else None
        return Address(self.host, self.port, self.user, identity, Path(self.known_hosts), self.host_keys)

    def command(self, module: str, arguments: Sequence[str], *, terminal: bool = False) -> list[str]:
        """argv that runs a command of ours there on that workspace."""
        words = [self.python, "-P", "-m", module, *arguments, "--workspace", self.workspace]
        return [*ssh_command(self.address, terminal=terminal), f"exec {shlex.join(words)}"]

    def ask(self, module: str, arguments: Sequence[str], given: bytes = b"") -> Any:
        """Run a command of ours there and read its JSON document. Raises ShardlabError with what it said."""
        argv = self.command(module, [*arguments, "--json"])
        try:
            done = subprocess.run(argv, input=given, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ShardlabError(f"{self.host}: {module} did not answer within {LIMIT_S:g} s.") from None
        said = "\n".join(done.stderr.decode("utf-8", "replace").strip().splitlines())  # ssh ends its own with \\r\\n
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise ShardlabError(f"{self.host}: {said.removeprefix('error: ') or f'exit code {done.returncode}'}") from None

    def hand_over(self, module: str, arguments: Sequence[str]) -> int:
        """Run a command of ours there, with this terminal as its own; its exit code. Raises ShardlabError."""
        terminal = sys.stdout.isatty() and sys.stdin.isatty()
        code = relay.run(self.command(module, arguments, terminal=terminal), terminal=terminal)
        if code == LOST:
            raise ShardlabError(f"{self.host}: the connection broke or was refused; runs that were sent go on.")
        return code


def of(workspace: Workspace, cluster: Cluster) -> Away:
    """Where the runs of this workspace are, on that cluster. Raises InputError."""
    if cluster.storage.shared is None:
        raise InputError(
            f"the cluster {cluster.name}: it has no folder that all nodes share, where its runs could lie. "
            "Allowed: with storage.shared in the cluster file."
        )
    address, python = inventory.controller(workspace, cluster)
    mark = f"{gethostname()}:{workspace.path}\n"
    short = hashlib.sha256(mark.encode()).hexdigest()[:8]
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in workspace.path.name)
    return Away(
        schema=1,
        cluster=cluster.name,
        host=address.host,
        port=address.port,
        user=address.user,
        identity=str(address.identity) if address.identity else None,
        known_hosts=str(address.known_hosts),
        host_keys=address.host_keys,
        python=python,
        workspace=str(PurePosixPath(cluster.storage.shared) / "workspaces" / f"{name[:40]}-{short}"),
        mark=mark,
    )


def known(workspace: Workspace) -> Away | None:
    """Where the runs of this workspace were sent, or None where they are here. Raises InputError."""
    path = workspace.own / "away.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Away)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not of this version: {error}; remove it and submit again.") from None


def keep(workspace: Workspace, away: Away) -> None:
    files.make_folder(workspace.own)
    files.write_json(workspace.own / "away.json", away)


def deliver(away: Away, texts: Mapping[str, bytes]) -> None:
    """Have files in the workspace there, by their paths in it. Raises ShardlabError."""
    document = {path: text.decode("utf-8", "surrogateescape") for path, text in texts.items()} | {MARK: away.mark}
    away.ask("shardlab.receive", [], json.dumps(document).encode())
