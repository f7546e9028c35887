"""`collect fetch --prune`: removes files on the cluster, or on nodes without a shared folder, that this machine also has.

The cluster or node computes the checksum of each file again, and this machine compares the checksum with its own copy of the
file. The file is removed there only if its checksum equals the copy's. If a run is still going on, or is not complete on this
machine, none of its files is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from socket import gethostname

import msgspec

from collect.fetching import gather
from collect.fetching.fetched_run import FetchedRun, Freed
from collect.fetching.progress import TransferProgress
from collect.fetching.pruning import is_kept_by_cluster
from collect.fetching.removal import RemovalRequest, RemovedFiles
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.remote import remote_workspace
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.runs import placement
from shardlab.runs.rundir import RunDir
from shardlab.transfer.manifest import RunManifest
from shardlab.workspace.workspace import Workspace

ANSWER_LIMIT_S = 3600.0  # time limit for an answer of the other machine, which reads all files that may be removed
NOTHING_TO_REMOVE = (
    "{}: the runs are stored in this folder alone, so there is nothing that `--prune` may remove. It "
    "frees a cluster of runs that were copied to another machine, or nodes that share no folder."
)


class RemoteFetchResult(msgspec.Struct):
    """One run in the output of `collect fetch --prune --json` on the cluster, with only the fields that this module needs."""

    run: str
    freed: list[Freed] = []


class VerifiedFiles(msgspec.Struct):
    """The files that may be removed in one place, because this machine has the same files."""

    where: str
    """The host of the cluster, or the node."""
    remote: RemoteWorkspace
    is_part: bool
    """Whether the files are a node's parts of runs, and not whole runs on the cluster."""
    run_ids_with_parts: list[str] = []
    """Ids of the runs whose parts are also on nodes, and were gathered on the cluster."""
    runs: list[RunManifest] = []
    """The files that may be removed, by run."""
    refusals: list[Freed] = []
    """One entry for each run whose files are not removed, with the reason."""

    @property
    def file_count(self) -> int:
        # The number of files that may be removed, over all runs.
        return sum(len(run.files) for run in self.runs)

    @property
    def files_bytes(self) -> int:
        """The size of the files that may be removed, in bytes."""
        return sum(file.bytes for run in self.runs for file in run.files.values())


class PrunePlace(msgspec.Struct):
    """A place that has files of runs: the cluster, or a node."""

    where: str
    """The host of the cluster, or the node."""
    remote: RemoteWorkspace
    run_ids: list[str]
    """Ids of the runs that have files in this place."""
    is_part: bool
    """Whether the files are a node's parts of runs, and not whole runs on the cluster."""


def must_be_stored_elsewhere(workspace: Workspace) -> None:
    """Raise InputError if the runs are stored only in this folder, because then `--prune` would remove the only copy.

    The runs are only in this folder if the cluster is local and no run has parts on other nodes, or if this folder is itself
    the workspace of the cluster, e.g. on shared storage.
    """
    remote_cluster = remote_workspace.read_workspace_to_change(workspace)
    if remote_cluster is None:
        if not any(
            placement.read_placement(RunDir(workspace.runs / run_id).read_events()) for run_id in workspace.list_run_ids()
        ):
            raise InputError(NOTHING_TO_REMOVE.format(workspace.path))
        return
    try:
        is_same_workspace = files.read(workspace.path / remote_workspace.MARK_FILE).decode() == remote_cluster.mark
    except (OSError, UnicodeDecodeError):
        is_same_workspace = False
    if is_same_workspace:
        raise InputError(NOTHING_TO_REMOVE.format(workspace.path))


def verify_files(workspace: Workspace, fetched_runs: Sequence[FetchedRun], progress: TransferProgress) -> list[VerifiedFiles]:
    """Compare the files of these runs in every other place (the cluster, or nodes) with the files on this machine, by checksum.

    Raises InputError if there is no other place (`must_be_stored_elsewhere`).
    """
    must_be_stored_elsewhere(workspace)
    removable_run_ids = []
    for run in fetched_runs:
        if run.complete and run.is_sound:
            removable_run_ids.append(run.run)
        else:
            refusal_reason = (
                "it is not whole on this machine" if run.complete or not run.is_sound else f"it has not ended ({run.state})"
            )
            progress.print_remark(f"{run.run}: its files stay: {refusal_reason}.")
    prune_places = _find_prune_places(workspace, removable_run_ids)
    if not prune_places:
        return []
    with ThreadPoolExecutor(max_workers=min(len(prune_places), gather.MOST_NODES_AT_ONCE)) as pool:
        try:
            return list(pool.map(lambda prune_place: _verify_place(workspace, prune_place, progress), prune_places))
        except BaseException:
            progress.stop()
            raise


def remove_verified_files(places: Sequence[VerifiedFiles], progress: TransferProgress) -> list[Freed]:
    """Remove the verified files in all places at the same time.

    Returns one entry for each run and place, also for runs whose files were not removed.
    """
    if not places:
        return []
    with ThreadPoolExecutor(max_workers=min(len(places), gather.MOST_NODES_AT_ONCE)) as pool:
        try:
            return [
                freed
                for freed_in_place in pool.map(lambda verified_place: _remove_from_place(verified_place, progress), places)
                for freed in freed_in_place
            ]
        except BaseException:
            progress.stop()
            raise


def _find_prune_places(workspace: Workspace, run_ids: Sequence[str]) -> list[PrunePlace]:
    remote_cluster = remote_workspace.read_remote_workspace(workspace)
    if remote_cluster is not None:
        return [PrunePlace(remote_cluster.host, remote_cluster, list(run_ids), False)] if run_ids else []
    run_ids_by_node: dict[tuple[str, str], list[str]] = {}
    for run_id in run_ids:
        run_dir = RunDir(workspace.runs / run_id)
        run_placement = placement.read_placement(run_dir.read_events())
        if run_placement is not None and run_placement.first_node == gethostname():
            for node_name in run_placement.nodes:
                run_ids_by_node.setdefault((run_dir.read_run().cluster["name"], node_name), []).append(run_id)
    return [
        PrunePlace(
            node_name,
            remote_workspace.find_node_workspace(workspace, gather.find_node(workspace, cluster_name, node_name)),
            node_run_ids,
            True,
        )
        for (cluster_name, node_name), node_run_ids in run_ids_by_node.items()
    ]


def _verify_place(workspace: Workspace, prune_place: PrunePlace, progress: TransferProgress) -> VerifiedFiles:
    verified_files = VerifiedFiles(prune_place.where, prune_place.remote, prune_place.is_part)
    try:
        listed_parts = gather.request_parts(prune_place.remote, prune_place.run_ids, progress)
    except ShardlabError as error:
        verified_files.refusals = [Freed(run_id, prune_place.where, why=str(error)) for run_id in prune_place.run_ids]
        return verified_files
    for run_id, part in listed_parts.items():
        if part.has_claim and prune_place.is_part:  # the run folder of the first node, not a part: nothing is removed from it
            continue
        place_manifest = part.manifest
        removable_names = [name for name in place_manifest.files if prune_place.is_part or not is_kept_by_cluster(name)]
        differing_names = [
            name
            for name in removable_names
            if not gather.has_file_content(workspace.runs / run_id, name, place_manifest.files[name])
        ]
        if differing_names:
            refusal_reason = f"{differing_names[0]} there is not the same as on this machine" + (
                f", and {len(differing_names) - 1} more" if differing_names[1:] else ""
            )
            verified_files.refusals.append(Freed(run_id, prune_place.where, why=refusal_reason))
        elif removable_names:
            place_manifest.files = {name: place_manifest.files[name] for name in removable_names}
            verified_files.runs.append(place_manifest)
            if not prune_place.is_part and placement.read_placement(RunDir(workspace.runs / run_id).read_events()) is not None:
                verified_files.run_ids_with_parts.append(run_id)
    return verified_files


def _remove_from_place(verified_place: VerifiedFiles, progress: TransferProgress) -> list[Freed]:
    refused_runs = [*verified_place.refusals]
    # the parts are removed first, because the cluster compares them with its own files of the runs
    if verified_place.run_ids_with_parts:
        refused_runs += _free_node_parts(verified_place, progress)
    staying_ids = {freed.run for freed in refused_runs if freed.why}
    removed_manifests = [run for run in verified_place.runs if run.run_id not in staying_ids]
    if not removed_manifests:
        return refused_runs
    request_json = msgspec.json.encode(RemovalRequest(removed_manifests, verified_place.is_part))
    stop_waiting = progress.make_wait_check(f"{verified_place.where}: files are removed.")
    try:
        removed_runs = verified_place.remote.ask_command(
            "collect.fetching.removal",
            [],
            list[RemovedFiles],
            input_bytes=request_json,
            limit_s=ANSWER_LIMIT_S,
            must_stop=stop_waiting,
        )
    except ShardlabError as error:
        return refused_runs + [Freed(run.run_id, verified_place.where, why=str(error)) for run in removed_manifests]
    return refused_runs + [Freed(run.run, verified_place.where, run.files, run.bytes, run.why) for run in removed_runs]


def _free_node_parts(verified_place: VerifiedFiles, progress: TransferProgress) -> list[Freed]:
    """Make the cluster remove the parts of runs from its nodes. The runs are those in `place.with_parts`."""
    run_options = [option_word for run_id in verified_place.run_ids_with_parts for option_word in ("--run", run_id)]
    stop_waiting = progress.make_wait_check(f"{verified_place.where}: the cluster verifies the parts of its nodes.")
    try:
        fetched_runs = verified_place.remote.ask_command(
            "collect",
            ["fetch", "--prune", "--yes", *run_options],
            list[RemoteFetchResult],
            limit_s=ANSWER_LIMIT_S,
            must_stop=stop_waiting,
        )
    except ShardlabError as error:
        return [Freed(run_id, verified_place.where, why=str(error)) for run_id in verified_place.run_ids_with_parts]
    return [freed for run in fetched_runs for freed in run.freed]
