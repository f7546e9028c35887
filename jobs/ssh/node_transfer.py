"""Copies files of the workspace from the first node to another node and back, for nodes that share no folder."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jobs.ssh.step import NodeLost
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.remote import remote_workspace
from shardlab.remote.remote_conversation import ConnectionLost, RemoteConversation
from shardlab.transfer.arrival import RunReceiver
from shardlab.transfer.file_sender import FileSender
from shardlab.transfer.messages import AskedFiles, OfferedFile, OfferedFiles, RunEnd, WantedIf
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

MustStop = Callable[[], bool]
NODE_SILENCE_S = 60.0  # a node that is silent for this many seconds is lost: it only stores or reads files


def send_files(node: InventoryNode, workspace: Workspace, wanted_by_path: Mapping[str, WantedIf], must_stop: MustStop) -> None:
    """Copy files and folders of the workspace to the same paths on a node. Ends early if `must_stop` says that the run must
    end.

    wanted_by_path: for each path relative to the workspace, when the node replaces its own file. Raises NodeLost if the
    connection broke, ShardlabError if a file could not be copied.
    """
    offered_files: dict[str, OfferedFile] = {}
    with files.as_workspace_error("read"), _start_conversation(node, workspace, must_stop) as conversation:
        for name, wanted_if in wanted_by_path.items():
            offered_files.update(_list_entries(workspace.path, name, wanted_if))
        conversation.send(OfferedFiles(offered_files))
        file_sender = FileSender(conversation.send_bytes)
        for name in conversation.receive(list[str]):
            if (offered_file := offered_files.get(name)) is None:
                raise InputError(f"asks for {name[:100]!r}, which was not offered")
            if stat.S_ISREG(offered_file.mode):
                file_sender.send_file(f"{workspace.path}/{name}", name, offered_file.bytes, offered_file.mtime_ns)
        file_sender.send_message(RunEnd(None))
        file_sender.flush_output()
        conversation.receive(bool)


def fetch_files(node: InventoryNode, workspace: Workspace, run_paths: Sequence[str], target: Path, must_stop: MustStop) -> None:
    """Copy files of runs from a node into the folder `target`, with the same names. Ends early if `must_stop` says that
    the run must end.

    run_paths: paths relative to the folder of all runs. Files that the node does not have are left out, without an error.
    Raises NodeLost and ShardlabError.
    """
    with files.as_workspace_error("write"), _start_conversation(node, workspace, must_stop) as conversation:
        conversation.send(AskedFiles(dict.fromkeys(run_paths)))
        RunReceiver(conversation, asked_names=set(run_paths)).receive_run("", target, {})


@contextlib.contextmanager
def _start_conversation(node: InventoryNode, workspace: Workspace, must_stop: MustStop) -> Iterator[RemoteConversation]:
    remote = remote_workspace.find_node_workspace(workspace, node)
    try:
        with RemoteConversation(remote, "shardlab.transfer.node_files", "jobs", NODE_SILENCE_S) as conversation:
            conversation.must_stop = must_stop
            yield conversation
    except ConnectionLost as error:
        if not must_stop():
            raise NodeLost(node.name, error.reason) from None
    except InputError as error:
        raise ShardlabError(f"{node.name}: {error}") from None


def _list_entries(workspace_path: Path, relative_path: str, wanted_if: WantedIf) -> Iterator[tuple[str, OfferedFile]]:
    """List a file, or a folder with all that is in it: (path relative to the workspace, what a node is offered)."""
    path = workspace_path / relative_path
    file_status = path.lstat()
    if not files.is_utf8(relative_path) or (stat.S_ISLNK(file_status.st_mode) and not files.is_utf8(str(path.readlink()))):
        raise InputError(f"{relative_path!r} or its link contains bytes that are not UTF-8. Allowed: names and links in UTF-8.")
    if stat.S_ISDIR(file_status.st_mode) or stat.S_ISREG(file_status.st_mode) or stat.S_ISLNK(file_status.st_mode):
        link = str(path.readlink()) if stat.S_ISLNK(file_status.st_mode) else ""
        yield relative_path, OfferedFile(file_status.st_mode, file_status.st_size, file_status.st_mtime_ns, link, wanted_if)
    if stat.S_ISDIR(file_status.st_mode):
        for entry_name in files.list_names(path):
            yield from _list_entries(workspace_path, f"{relative_path}/{entry_name}", wanted_if)
