"""Gathers the parts of runs on the first node, only if a run has parts on other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from collect.fetching.progress import TransferProgress
from shardlab.errors import ShardlabError
from shardlab.runs import placement
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


def gather_parts_if_needed(workspace: Workspace, run_ids: Sequence[str], progress: TransferProgress) -> dict[str, list[str]]:
    """Do what `gather.gather_parts` does, if any of these runs has parts on other nodes. Returns what it returns."""
    if not any(_has_node_parts(RunDir(workspace.runs / run_id)) for run_id in run_ids):
        return {}
    from collect.fetching import gather  # imported only if it is needed: its imports take longer than a small transfer

    return gather.gather_parts(workspace, run_ids, progress)


def _has_node_parts(run_dir: RunDir) -> bool:
    try:
        return placement.read_placement(run_dir.read_events()) is not None
    except ShardlabError:  # the events cannot be read: `fetched_run.check_run` reports this
        return False
