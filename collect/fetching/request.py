"""Asks the cluster for its runs. `collect fetch` begins with this module and imports the others afterwards, so that the cluster
starts its program at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from collect.fetching.messages import Asked
from shardlab import files, remote_workspace
from shardlab.console import Output
from shardlab.remote_conversation import RemoteConversation
from shardlab.workspace import Workspace

WAITING = "another collect fetch is transferring files to this workspace; waiting until that command has ended."


@contextmanager
def asked(workspace: Workspace, patterns: Sequence[str], output: Output) -> Iterator[RemoteConversation | None]:
    """During the block, the cluster executes collect.fetching.sender, which sends runs, and no other `collect fetch`
    transfers files to this workspace.

    patterns: shell patterns of the ids of the runs that the cluster offers; if there are none, it offers all runs.
    Yields the conversation with the program, or None if the cluster is local, because its runs are already in this workspace.
    Raises ShardlabError if the login fails.
    """
    there = remote_workspace.known(workspace)
    if there is None:
        yield None
        return
    files.make_folder(workspace.runs)
    with (
        files.locked(workspace.own / "fetch.lock", lambda _descriptor: output.remark(WAITING)),
        RemoteConversation(there, "collect.fetching.sender", "collect fetch") as conversation,
    ):
        conversation.send(Asked(list(patterns)))
        yield conversation
