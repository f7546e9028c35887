"""Copies files of the workspace from the first node to another node and back, for nodes that share no folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.ssh.step import NodeLost
from shardlab.cluster.address import Address
from shardlab.errors import ShardlabError
from shardlab.remote import rsync
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

SILENT_S = 60  # rsync gives up a connection over which nothing came for this many seconds

MustStop = Callable[[], bool]


def send_files(node: InventoryNode, workspace: Workspace, names: Sequence[str], must_stop: MustStop, *options: str) -> None:
    """Copy files and folders of the workspace to the same paths on a node. Ends early if `must_stop` says that the run must
    end.

    Raises NodeLost if the connection broke, ShardlabError if a file could not be copied.
    """
    remote_target, login_options = _make_remote_words(node, workspace)
    rsync_options = ["--archive", "--recursive", f"--timeout={SILENT_S}", *login_options, *options]
    rsync_end = rsync.run_rsync(rsync_options, names, f"{workspace.path}/", remote_target, must_stop=must_stop)
    _check_rsync_end(node, rsync_end, allowed=())


def fetch_files(node: InventoryNode, workspace: Workspace, names: Sequence[str], target: Path, must_stop: MustStop) -> None:
    """Copy files and folders of the workspace from a node into the folder `target`, with the same names. Ends early if
    `must_stop` says that the run must end.

    Files that the node does not have are left out, without an error. Raises NodeLost and ShardlabError.
    """
    remote_source, login_options = _make_remote_words(node, workspace)
    rsync_options = [*rsync.FROM_OTHERS, "--recursive", "--times", f"--timeout={SILENT_S}", *login_options]
    rsync_end = rsync.run_rsync(rsync_options, names, remote_source, f"{target}/", must_stop=must_stop)
    _check_rsync_end(node, rsync_end, allowed=rsync.INCOMPLETE_COPY_CODES)


def _make_remote_words(node: InventoryNode, workspace: Workspace) -> tuple[str, list[str]]:
    rsync.rsync_must_be_installed("a run on nodes that share no folder")
    return rsync.remote_words(Address(node.host, node.port, node.user), f"{workspace.path}/")


def _check_rsync_end(node: InventoryNode, rsync_end: rsync.RsyncEnd, *, allowed: Sequence[int]) -> None:
    if rsync_end.is_connection_lost:
        raise NodeLost(node.name, rsync_end.error)
    if rsync_end.code and rsync_end.code not in allowed:
        raise ShardlabError(f"{node.name}: {rsync_end.error}.")
