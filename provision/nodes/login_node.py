"""The login node of a Slurm site, where shardlab has the rights of the user. All commands there share one SSH connection."""

from __future__ import annotations

from pathlib import Path

from provision.nodes.local_node import LocalNode
from provision.nodes.ssh_node import SshNode
from shardlab.cluster.address import Address
from shardlab.remote.login_shell import PRINT_PATH
from shardlab.remote.remote import CommandOutput, Remote, make_put_command

# Takes PATH from a login shell if sbatch is not found: a command over SSH runs in no login shell, and at many sites only login
# shells have Slurm's commands in PATH.
FIND_SLURM = f"""\
command -v sbatch > /dev/null 2>&1 || {{
    path=$({PRINT_PATH}) || exit 1
    export PATH="$path"
}}
"""


class LoginNode(SshNode, eq=False):
    """The login node of a Slurm site, if it is another machine. Commands that need root are refused."""

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file on the login node as the user, completely or not at all. owner: is ignored. Raises Unreachable."""
        return super().put(content, path, mode=mode, owner="")


def make_login_node(address: Address, python: str = "python3") -> LoginNode:
    """The login node with this SSH address."""
    return LoginNode(
        name=address.host, host=address.host, port=address.port, user=address.user, identity=address.identity, python=python,
        remote=Remote(address, may_sudo=False, prepare_script=FIND_SLURM), may_sudo=False,
        why_no_root="users of a Slurm site do not have it",
    )  # fmt: skip


def make_login_address(host: str, user: str | None = None, port: int | None = None, identity: Path | None = None) -> Address:
    """The SSH address of a login node, with one connection that all commands share."""
    return Address(host, port, user, identity, shared=True)


class LocalLoginNode(LocalNode, eq=False):
    """The login node of a Slurm site, if this program runs on this node."""

    may_sudo: bool = False

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file as this user, completely or not at all. owner: is ignored."""
        return self.run(make_put_command(content, path, mode=mode, owner=""), timeout_s=600, stdin=content)
