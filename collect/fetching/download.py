"""Downloads the runs of a workspace that lies on a remote cluster.

The cluster sends the files of each run over one connection (collect.fetching.sender). Both machines hash each file while it is
sent. The files arrive in a staging folder. If all files of a run are equal to those on the cluster, they are moved into the run
folder, and the manifest is written last. So every run with a manifest on this machine was checked. If a download is
interrupted, the same command resumes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from collect.fetching import fetch_matrices
from collect.fetching.fetched_run import DownloadedRun
from collect.fetching.progress import TransferProgress
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, gc_pause
from shardlab.files.files import NotRegular
from shardlab.remote import remote_workspace
from shardlab.remote.remote_conversation import ConnectionLost, RemoteConversation
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import STATE_MEANINGS
from shardlab.transfer import manifest
from shardlab.transfer.arrival import HeldCopy, RunReceiver
from shardlab.transfer.manifest import ManifestFile, RunManifest
from shardlab.transfer.messages import HeldFile, OfferedRun, RunOffers, WantedRun, WantedRuns
from shardlab.workspace.workspace import Workspace

STAGING_FOLDER = (
    ".incoming"  # the staging folder; it lies in runs/, so that a file can be moved into its run folder by a rename
)


class MissingFiles(msgspec.Struct):
    """A run that may be incomplete on this machine, with the files that have to be transferred."""

    manifest: RunManifest
    names: list[str]
    """Names of the files that are missing on this machine, or differ here from the manifest."""
    hashed_files: int
    """Number of files on this machine that were hashed to compare them with the manifest."""
    is_run_here: bool = False
    """Whether the run, including its manifest, is already on this machine."""


class ExpectedRun(msgspec.Struct):
    """A run that the cluster is asked to send."""

    offered: OfferedRun
    wanted_names: list[str] | None
    """The files that are wanted; None: all files of the run."""
    held_copies: dict[str, HeldCopy]
    """What is on this machine already, by name of the file."""

    @property
    def expected_bytes(self) -> int:
        """The number of bytes that the cluster will send, if all copies on this machine are as on the cluster."""
        cluster_manifest = self.offered.manifest
        files_bytes = (
            self.offered.bytes
            if cluster_manifest is None
            else sum(cluster_manifest.files[file_name].bytes for file_name in self.wanted_names or ())
        )
        return max(0, files_bytes - sum(copy.file.bytes for copy in self.held_copies.values()))

    @property
    def wanted_run(self) -> WantedRun:
        return WantedRun(self.offered.run, self.wanted_names, {name: copy.file for name, copy in self.held_copies.items()})


def download_runs(
    workspace: Workspace, patterns: Sequence[str], conversation: RemoteConversation, progress: TransferProgress
) -> dict[str, DownloadedRun]:
    """Download every run whose id matches one of the patterns, or all runs if there are no patterns.

    conversation: as `fetch_command._open_conversation` yields it for these patterns.
    Returns {run id: result}. A run that is equal on this machine and on the cluster is not transferred. Raises ShardlabError if
    the cluster does not answer or the transfer stops.
    """
    cluster = conversation.remote
    conversation.must_stop = progress.make_wait_check(f"{cluster.host}: the cluster reads the files of its runs.")
    with gc_pause.pause_collector():
        offers = conversation.receive(RunOffers)
        offered_runs = [conversation.receive(OfferedRun) for _ in range(offers.runs)]
        conversation.must_stop = progress.is_stopped  # the progress of the transfer now says what the command waits for
        staging_folder = _make_staging_folder(workspace)
        with files.as_workspace_error("read"):
            result_by_run, expected_runs = _compare_offers(
                workspace, staging_folder, list({run.run: run for run in offered_runs}.values())
            )
        is_shared = is_workspace_shared(cluster)
        conversation.send(WantedRuns([run.wanted_run for run in expected_runs], is_shared))
        report_bytes = _begin_progress(cluster, expected_runs, progress)
        remaining_runs = deque(expected_runs)
        arrival = RunReceiver(conversation, Path(cluster.workspace) / "runs" if is_shared else None, report_bytes)
        try:
            with files.as_workspace_error("write"):
                while remaining_runs:
                    _receive_run(workspace, cluster, arrival, remaining_runs[0], result_by_run[remaining_runs[0].offered.run])
                    remaining_runs.popleft()
        except ConnectionLost as error:
            raise ShardlabError(_describe_stopped_transfer(cluster, error.reason, result_by_run, remaining_runs)) from None
        fetch_matrices.store_matrix_descriptions(workspace, offers.descriptions)
        if not patterns:
            shutil.rmtree(staging_folder, ignore_errors=True)
    return result_by_run


def is_workspace_shared(cluster: RemoteWorkspace) -> bool:
    """Whether this machine sees the workspace of the cluster under the same path, e.g. on shared storage."""
    try:
        return files.read(Path(cluster.workspace) / remote_workspace.MARK_FILE).decode() == cluster.mark
    except (OSError, UnicodeDecodeError):
        return False


def _make_staging_folder(workspace: Workspace) -> Path:
    """Make the staging folder, into which files are transferred. Files that an interrupted download left there stay."""
    staging_folder = workspace.runs / STAGING_FOLDER
    with files.as_workspace_error("write"):
        with contextlib.suppress(FileExistsError):
            staging_folder.mkdir(mode=0o700)
        if not files.is_folder(staging_folder):
            raise InputError(f"{staging_folder}: is not a folder; remove it and run the same command again.")
        shutil.rmtree(staging_folder / "whole", ignore_errors=True)
    return staging_folder


def _compare_offers(
    workspace: Workspace, staging: Path, offered_runs: Sequence[OfferedRun]
) -> tuple[dict[str, DownloadedRun], list[ExpectedRun]]:
    """Compare the runs that the cluster offers with the runs on this machine. Returns ({run id: result so far}, the runs that
    are wanted)."""
    result_by_run: dict[str, DownloadedRun] = {}
    expected_runs = []
    for run in offered_runs:
        offered_state = run.state if run.state in STATE_MEANINGS else "unknown"
        result_by_run[run.run] = downloaded_run = DownloadedRun(offered_state, not_regular=run.not_regular, parts=run.parts)
        cluster_problems = [f"on the cluster: {problem}" for problem in run.problems]
        wanted_names = None
        if run.manifest is not None:
            try:
                missing_files = _find_missing_files(workspace, run.run, run.manifest)
            except (InputError, NotRegular) as error:
                downloaded_run.problems = [_describe_problem(workspace, error), *cluster_problems]
                continue
            downloaded_run.hashed, wanted_names = missing_files.hashed_files, missing_files.names
            if missing_files.is_run_here:
                continue
        if run.problems and wanted_names != []:
            downloaded_run.problems = cluster_problems
        elif run.pruned and wanted_names:
            downloaded_run.problems = [_describe_pruned_files(wanted_names)]
        else:
            expected_runs.append(
                ExpectedRun(
                    run, wanted_names, _find_held_files(workspace.runs / run.run, staging / "files" / run.run, wanted_names)
                )
            )
    return result_by_run, expected_runs


def _find_held_files(run_path: Path, staging_folder: Path, searched_names: Sequence[str] | None) -> dict[str, HeldCopy]:
    """Find the files, or the beginnings of files, that are on this machine: in the run folder, or in the staging folder, where
    an interrupted transfer left them. searched_names: the wanted files; None: all files."""
    local_manifest = None
    with contextlib.suppress(InputError, NotRegular):
        local_manifest = (
            manifest.read_manifest(RunDir(run_path)) if manifest.read_file_status(run_path, manifest.MANIFEST_FILE) else None
        )
    held_copies: dict[str, HeldCopy] = {}
    wanted_name_set = None if searched_names is None else set(searched_names)
    for folder, folder_manifest in ((run_path, local_manifest), (staging_folder, None)):
        if not files.is_folder(folder):
            continue
        for file_name, file_status in manifest.list_files(folder).status_by_file.items():
            if (wanted_name_set is None or file_name in wanted_name_set) and file_status.st_size:
                old_file = folder_manifest.files.get(file_name) if folder_manifest else None
                is_unchanged = old_file is not None and manifest.is_unchanged(old_file, file_status)
                held_file = old_file if old_file and is_unchanged else manifest.hash_file(folder / file_name, file_status)
                held_copies[file_name] = HeldCopy(folder / file_name, HeldFile(held_file.bytes, held_file.sha256))
    return held_copies


def _begin_progress(
    cluster: RemoteWorkspace, expected_runs: Sequence[ExpectedRun], progress: TransferProgress
) -> Callable[[int], None]:
    """Say how much will be transferred. Returns the function that is called with the number of bytes that have come."""
    expected_bytes = sum(run.expected_bytes for run in expected_runs)
    if not expected_runs:
        return lambda _count: None
    progress.print_remark(f"{cluster.host}: {len(expected_runs):,} run(s), {expected_bytes / 2**20:,.1f} MiB")
    return progress.begin_transfer(expected_bytes)


def _receive_run(
    workspace: Workspace, cluster: RemoteWorkspace, arrival: RunReceiver, run: ExpectedRun, downloaded_run: DownloadedRun
) -> None:
    """Receive the files of a run, and move them into the run folder if all of them are as on the cluster. Problems are added to
    `downloaded_run`. Raises ShardlabError if the cluster sends something that is not allowed, and OSError if a file cannot be
    written."""
    run_id, staging_folder = run.offered.run, workspace.runs / STAGING_FOLDER
    folder = staging_folder / "files" / run_id
    try:
        arrived_run = arrival.receive_run(run_id, folder, run.held_copies)
    except InputError as error:
        raise ShardlabError(f"{cluster.host}: {error}; the run {run_id} on this machine was not changed.") from None
    except (IsADirectoryError, NotADirectoryError, FileExistsError):
        # A file has the name of a folder that an interrupted transfer left. The next command begins this run anew.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if arrived_run.run_end.problems:
        downloaded_run.problems = [f"on the cluster: {problem}" for problem in arrived_run.run_end.problems]
        return
    cluster_manifest = run.offered.manifest or arrived_run.run_end.manifest
    try:
        if cluster_manifest is None:
            raise InputError("the cluster has no manifest of this run")
        missing_files = _find_missing_files(workspace, run_id, cluster_manifest)
    except (InputError, NotRegular) as error:
        downloaded_run.problems = [_describe_problem(workspace, error)]
        return
    downloaded_run.hashed += len(arrived_run.files)
    # The cluster sends nothing of a file that an interrupted transfer left complete.
    arrived_digests = {name: copy.file.sha256 for name, copy in run.held_copies.items() if copy.path.is_relative_to(folder)}
    arrived_digests |= {name: file.sha256 for name, file in arrived_run.files.items()}
    differing_names = [name for name in missing_files.names if arrived_digests.get(name) != cluster_manifest.files[name].sha256]
    if differing_names:
        downloaded_run.problems = [
            f"{name}: the file that arrived is not the file in the cluster's manifest" for name in differing_names
        ]
        shutil.rmtree(folder, ignore_errors=True)
    elif not missing_files.is_run_here:
        is_whole = arrived_run.is_alone and bool(arrived_run.files) and arrived_run.files == cluster_manifest.files
        if _put_run_in_place(workspace, staging_folder, missing_files, is_complete=is_whole) and is_whole:
            downloaded_run.new_manifest = cluster_manifest


def _find_missing_files(workspace: Workspace, run_id: str, cluster_manifest: RunManifest) -> MissingFiles:
    """Compare a run on this machine with its manifest from the cluster. Returns the files that have to be transferred.

    Raises InputError or NotRegular if the run cannot be downloaded.
    """
    manifest.check_received_manifest(cluster_manifest, run_id)
    run = RunDir(workspace.runs / run_id)
    local_manifest = None
    with contextlib.suppress(InputError, FileNotFoundError):  # if the manifest here is damaged, all files are compared
        local_manifest = manifest.read_manifest(run) if manifest.read_file_status(run.path, manifest.MANIFEST_FILE) else None
    missing_files = MissingFiles(cluster_manifest, [], 0)
    if not os.path.lexists(run.path):
        missing_files.names = list(cluster_manifest.files)
        return missing_files
    for file_name, manifest_file in cluster_manifest.files.items():
        file_status = manifest.read_file_status(run.path, file_name)
        if file_status is None:
            missing_files.names.append(file_name)
            continue
        local_file = local_manifest.files.get(file_name) if local_manifest else None
        if local_file is None or not manifest.is_unchanged(local_file, file_status):
            current_file = manifest.hash_file(run.path / file_name, file_status)
            missing_files.hashed_files += 1
            if (
                local_manifest is not None
                and local_manifest.complete
                and local_file is not None
                and _was_changed_here(run.path / file_name, current_file, local_file)
            ):
                # The file is not overwritten. `fetch_run` compares the run with its manifest and reports the difference.
                return MissingFiles(local_manifest, [], missing_files.hashed_files, True)
            local_file = current_file
        if local_file.sha256 != manifest_file.sha256:
            missing_files.names.append(file_name)
    missing_files.is_run_here = (
        not missing_files.names and local_manifest is not None and local_manifest.has_same_content(cluster_manifest)
    )
    return missing_files


def _was_changed_here(path: Path, current_file: ManifestFile, old_file: ManifestFile) -> bool:
    """Whether a file was changed on this machine after it was fetched.

    A file that differs from `old_file` (its entry in the manifest) but is not newer was left by an interrupted transfer.
    """
    return (
        current_file.sha256 != old_file.sha256
        and current_file.mtime_ns > old_file.mtime_ns
        and not manifest.only_appended(path, old_file)
    )


def _put_run_in_place(workspace: Workspace, staging_folder: Path, missing_files: MissingFiles, *, is_complete: bool) -> bool:
    """Move the transferred files of a run into its folder in runs/, then write its manifest.

    If the run has no folder in runs/ yet, all files are first put together, and the folder appears in runs/ when it is
    complete. Returns whether the folder in which the files arrived became the run folder.

    is_complete: whether the folder in which the files arrived has exactly the files of the manifest, with their times and
    modes."""
    run_id = missing_files.manifest.run_id
    run_folder, arrived_folder = workspace.runs / run_id, staging_folder / "files" / run_id
    is_new = not run_folder.exists()
    if is_new and is_complete:
        files.write_json(arrived_folder / manifest.MANIFEST_FILE, missing_files.manifest, sync=False)
        arrived_folder.rename(run_folder)
        return True
    target_folder = staging_folder / "whole" / run_id if is_new else run_folder
    files.make_folder(target_folder)
    for file_name in missing_files.names:
        manifest.put_in_place(arrived_folder / file_name, target_folder / file_name, missing_files.manifest.files[file_name])
    files.write_json(target_folder / manifest.MANIFEST_FILE, missing_files.manifest, sync=False)
    if is_new:
        target_folder.rename(run_folder)
    shutil.rmtree(arrived_folder, ignore_errors=True)
    return False


def _describe_problem(workspace: Workspace, error: Exception) -> str:
    if not isinstance(error, NotRegular):
        return str(error)
    run_path = Path(error.filename).relative_to(workspace.runs)
    return (
        f"{run_path} is {error.kind} on this machine, and collect fetch writes only to regular files and folders; "
        "remove it and run the same command again"
    )


def _describe_pruned_files(file_names: Sequence[str]) -> str:
    rest_text = f" and {len(file_names) - 1} more files are" if file_names[1:] else " is"
    return f"{file_names[0]}{rest_text} not here, and `collect fetch --prune` has removed the files of this run on the cluster"


def _describe_stopped_transfer(
    cluster: RemoteWorkspace, reason: str, result_by_run: Mapping[str, DownloadedRun], remaining_runs: Sequence[ExpectedRun]
) -> str:
    done_count = sum(not run.problems for run in result_by_run.values()) - len(remaining_runs)
    progress_text = f"{done_count} of {len(result_by_run)} runs are on this machine and were checked"
    return f"{cluster.host}: the transfer stopped: {reason}. {progress_text}; run the same command again to continue."
