"""Fetches the files of runs, writes their manifests, and compares them with the manifests of an earlier fetch.

The runs of a local cluster are already in the workspace, so only their manifests are written. The runs of a remote cluster are
downloaded first. If each node has its own part of a run's folder, the first node gathers the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from collect.fetching import fetched_run, node_parts, side_by_side
from collect.fetching.fetched_run import Downloaded, Fetched
from collect.fetching.progress import TransferProgress
from shardlab.remote_conversation import RemoteConversation
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace, chosen


def fetch(
    workspace: Workspace, patterns: Sequence[str], conversation: RemoteConversation | None, progress: TransferProgress
) -> list[Fetched]:
    """Fetch every run whose id matches one of the patterns, or all runs if there are no patterns.

    conversation: as `request.asked` yields it for these patterns. Raises InputError if a pattern matches no run.
    """
    downloaded: dict[str, Downloaded] = {}
    if conversation is not None:
        from collect.fetching import download

        downloaded = download.download(workspace, patterns, conversation, progress)
    known = sorted({*workspace.run_ids(), *downloaded})
    ids = chosen(known, patterns) if patterns else known
    parts = {run_id: run.parts for run_id, run in downloaded.items()}
    parts |= node_parts.gathered(workspace, [run_id for run_id in ids if run_id not in downloaded], progress)

    def fetched(run_id: str) -> Fetched:
        return fetched_run.fetch_run(RunDir(workspace.runs / run_id), downloaded.get(run_id), parts.get(run_id, []))

    return list(side_by_side.each(fetched, ids))
