"""Downloads the runs of a workspace that lies on a remote cluster.

rsync copies the files of the runs into a staging folder, while the cluster hashes them (collect.fetching.sender). If all files
of a run have the hashes that the cluster found, they are moved into the run folder, and the manifest is written last. So every
run with a manifest on this machine was checked. If a download is interrupted, the same command resumes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from collect.fetching import fetch_matrices, manifest
from collect.fetching.fetched_run import Downloaded
from collect.fetching.manifest import ManifestFile, RunManifest
from collect.fetching.messages import CheckedRun, ListedRun, OfferedRun, Offers, Wanted
from collect.fetching.progress import TransferProgress
from collect.fetching.transfer import Rsync, find_arrived_files, finish_folder, put_in_place
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, gc_pause
from shardlab.files.files import NotRegular
from shardlab.remote.remote_conversation import ConnectionLost, RemoteConversation
from shardlab.remote.rsync import RsyncEnd
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import STATES
from shardlab.workspace.workspace import Workspace

STAGING = ".incoming"  # the staging folder; it lies in runs/, so that a file can be moved into its run folder by a rename
# Options of rsync in the first and in the second try. The second try is for runs whose files differ from what the cluster
# hashed: then rsync does not skip a file because its size and time are equal.
TRIES: tuple[tuple[str, ...], ...] = ((), ("--ignore-times",))


class Missing(msgspec.Struct):
    """A run that may be incomplete on this machine, with the files that have to be transferred."""

    manifest: RunManifest
    names: list[str]
    """Names of the files that are missing on this machine, or differ here from the manifest."""
    hashed: int
    """Number of files on this machine that were hashed to compare them with the manifest."""
    is_here: bool = False
    """Whether the run, including its manifest, is already on this machine."""


class Expected(msgspec.Struct):
    """A run that the cluster is asked to send."""

    offered: OfferedRun
    result: Downloaded
    """What is known of the download so far."""
    missing: Missing | None
    """None: the cluster has no manifest of the run yet, so all its files may be missing."""


class Download:
    """One download of the runs for which the cluster was asked."""

    def __init__(self, workspace: Workspace, conversation: RemoteConversation, lock: int, progress: TransferProgress) -> None:
        """conversation, lock: as `fetch_command._ask_for_runs` yields them."""
        self._workspace, self._conversation, self._lock, self._progress = workspace, conversation, lock, progress
        self._staging, self._host = workspace.runs / STAGING, conversation.remote.host
        self._results: dict[str, Downloaded] = {}

    def download(self, *, all_runs: bool) -> dict[str, Downloaded]:
        """Download the runs. Returns {run id: result}. A run that is equal here and on the cluster is not transferred.

        all_runs: whether the cluster was asked for all its runs. Raises ShardlabError if the cluster does not answer or the
        transfer stops.
        """
        conversation = self._conversation
        conversation.must_stop = self._progress.while_waiting(f"{self._host}: the cluster reads the files of its runs.")
        with gc_pause.pause_collector():
            offers = conversation.receive(Offers)
            offered = [conversation.receive(OfferedRun) for _ in range(offers.runs)]
            conversation.must_stop = self._progress.is_stopped  # the progress of the transfer now says what is waited for
            _make_staging_folder(self._staging)
            with files.as_workspace_error("read"):
                expected = self._compare_offers(list({run.run: run for run in offered}.values()))
            with files.as_workspace_error("write"):
                for options in TRIES:
                    expected = self._transfer(expected, options)
            fetch_matrices.store(self._workspace, offers.descriptions)
            if all_runs:
                shutil.rmtree(self._staging, ignore_errors=True)
        return self._results

    def _compare_offers(self, offered: Sequence[OfferedRun]) -> list[Expected]:
        """Compare the runs that the cluster offers with the runs on this machine. Returns the runs that are wanted."""
        expected = []
        for run in offered:
            state = run.state if run.state in STATES else "unknown"
            self._results[run.run] = result = Downloaded(state, not_regular=run.not_regular, parts=run.parts)
            cluster_problems = [f"on the cluster: {problem}" for problem in run.problems]
            missing = None
            if run.manifest is not None:
                try:
                    missing = _find_missing_files(self._workspace, run.run, run.manifest)
                except (InputError, NotRegular) as error:
                    result.problems = [_problem_text(self._workspace, error), *cluster_problems]
                    continue
                result.hashed = missing.hashed
                if missing.is_here:
                    continue
            if run.problems and (missing is None or missing.names):
                result.problems = cluster_problems
            elif run.pruned and missing is not None and missing.names:
                result.problems = [_pruned_text(missing.names)]
            else:
                expected.append(Expected(run, result, missing))
        return expected

    def _transfer(self, expected: Sequence[Expected], options: Sequence[str]) -> list[Expected]:
        """Copy the files of runs, and put the runs in place whose files are as on the cluster. Returns the other runs.

        options: further options of rsync.
        """
        remaining = list(expected)
        if not remaining:
            return []
        try:
            self._conversation.send(Wanted([run.offered.run for run in expected]))
            end = self._copy_files({run.offered.run: self._receive_sizes(run) for run in expected}, options)
            for run in expected:
                checked = self._conversation.receive(CheckedRun)
                if self._put_in_place(run, checked, has_arrived=end.has_tried_all):
                    remaining.remove(run)
        except ConnectionLost as error:
            raise self._stop_error(error.why, remaining) from None
        if not end.has_tried_all:
            reason = "the connection broke" if end.is_connection_lost else "rsync ended"
            raise self._stop_error(f"{reason} ({end.error})", remaining)
        return remaining

    def _receive_sizes(self, run: Expected) -> dict[str, int]:
        """Receive which files a run has. Returns the size of each file to copy by its name."""
        sizes = self._conversation.receive(ListedRun).files
        try:
            manifest.check_names(sizes.keys())
        except InputError as error:
            raise ShardlabError(f"{self._host}: {error}; the run {run.offered.run} on this machine was not changed.") from None
        return sizes if run.missing is None else {name: sizes.get(name, 0) for name in run.missing.names}

    def _copy_files(self, sizes_by_run: Mapping[str, Mapping[str, int]], options: Sequence[str]) -> RsyncEnd:
        """Copy files into the staging folder with rsync. A file that is there, or in its run folder, is not copied again.

        sizes_by_run: {run id: {name: size}}.
        """
        sizes = {f"{run_id}/{name}": size for run_id, run_sizes in sizes_by_run.items() for name, size in run_sizes.items()}
        target = self._staging / "files"
        copied_bytes = sum(size for name, size in sizes.items() if not _has_size((self._workspace.runs, target), name, size))
        self._progress.say(f"{self._host}: {len(sizes_by_run):,} run(s), {copied_bytes / 2**20:,.1f} MiB")
        transfer = Rsync(self._conversation.remote, self._lock, self._progress.is_stopped)
        compare = f"--compare-dest={self._workspace.runs}"
        return transfer.copy_files(target, list(sizes), compare, *options, report=self._progress.begin(copied_bytes))

    def _put_in_place(self, run: Expected, checked: CheckedRun, *, has_arrived: bool) -> bool:
        """Move the files of a run into the run folder if all of them are as on the cluster. Returns whether they are; if not,
        the result says why.

        has_arrived: whether all files of the run should have arrived.
        """
        run_id, folder = run.offered.run, self._staging / "files" / run.offered.run
        run.result.problems = [f"on the cluster: {problem}" for problem in checked.problems]
        if checked.problems:
            return False
        cluster_manifest = run.offered.manifest or checked.manifest
        try:
            if cluster_manifest is None:
                raise InputError("the cluster has no manifest of this run")
            missing = run.missing or _find_missing_files(self._workspace, run_id, cluster_manifest)
        except (InputError, NotRegular) as error:
            run.result.problems = [_problem_text(self._workspace, error)]
            return False
        arrived = find_arrived_files(folder, {name: cluster_manifest.files[name] for name in missing.names})
        differing_names = [name for name in missing.names if name not in arrived]
        if differing_names:
            if has_arrived:
                shutil.rmtree(folder, ignore_errors=True)
                run.result.problems = [
                    f"{name}: the file that arrived is not the file in the cluster's manifest" for name in differing_names
                ]
            return False
        run.result.hashed += len(missing.names) + (missing.hashed if run.missing is None else 0)
        if not missing.is_here and _put_run_in_place(self._workspace, self._staging, missing):
            run.result.new_manifest = cluster_manifest
        return True

    def _stop_error(self, reason: str, remaining: Sequence[Expected]) -> ShardlabError:
        """The error if the transfer stopped before it had copied the files of the runs `remaining`."""
        done = sum(not result.problems for result in self._results.values())
        done -= sum(not run.result.problems for run in remaining)
        so_far = f"{done} of {len(self._results)} runs are on this machine and were checked"
        return ShardlabError(f"{self._host}: the transfer stopped: {reason}. {so_far}; run the same command again to continue.")


def _make_staging_folder(staging: Path) -> None:
    """Make the staging folder, into which files are transferred. Files that an interrupted download left there stay."""
    with files.as_workspace_error("write"):
        with contextlib.suppress(FileExistsError):
            staging.mkdir(mode=0o700)
        if not files.is_folder(staging):
            raise InputError(f"{staging}: is not a folder; remove it and run the same command again.")
        shutil.rmtree(staging / "whole", ignore_errors=True)


def _has_size(folders: Sequence[Path], name: str, size: int) -> bool:
    """Whether a file in one of the folders has this size."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if os.lstat(f"{folder}/{name}").st_size == size:
                return True
    return False


def _find_missing_files(workspace: Workspace, run_id: str, cluster_manifest: RunManifest) -> Missing:
    """Compare a run on this machine with its manifest from the cluster. Returns the files that have to be transferred.

    Raises InputError or NotRegular if the run cannot be downloaded.
    """
    manifest.check_received(cluster_manifest, run_id)
    run = RunDir(workspace.runs / run_id)
    own_manifest = None
    with contextlib.suppress(InputError, FileNotFoundError):  # if the manifest here is damaged, all files are compared
        own_manifest = manifest.read(run) if manifest.regular_file_status(run.path, manifest.NAME) else None
    missing = Missing(cluster_manifest, [], 0)
    if not os.path.lexists(run.path):
        missing.names = list(cluster_manifest.files)
        return missing
    for name, file in cluster_manifest.files.items():
        status = manifest.regular_file_status(run.path, name)
        if status is None:
            missing.names.append(name)
            continue
        own_file = own_manifest.files.get(name) if own_manifest else None
        if own_file is None or not manifest.is_unchanged(own_file, status):
            content = manifest.hash_file(run.path / name, status)
            missing.hashed += 1
            if (
                own_manifest is not None
                and own_manifest.complete
                and own_file is not None
                and _was_changed_here(run.path / name, content, own_file)
            ):
                # The file is not overwritten. `fetch_run` compares the run with its manifest and reports the difference.
                return Missing(own_manifest, [], missing.hashed, True)
            own_file = content
        if own_file.sha256 != file.sha256:
            missing.names.append(name)
    missing.is_here = not missing.names and own_manifest is not None and own_manifest.has_same_content(cluster_manifest)
    return missing


def _was_changed_here(path: Path, content: ManifestFile, recorded: ManifestFile) -> bool:
    """Whether a file was changed on this machine after it was fetched.

    A file that differs from `recorded` (its entry in the manifest) but is not newer was left by an interrupted transfer.
    """
    return content.sha256 != recorded.sha256 and content.mtime_ns > recorded.mtime_ns and not manifest.only_grew(path, recorded)


def _put_run_in_place(workspace: Workspace, staging: Path, missing: Missing) -> bool:
    """Move the transferred files of a run into its folder in runs/, then write its manifest.

    If the run has no folder in runs/ yet, all files are first put together, and the folder appears in runs/ when it is
    complete. Returns whether the folder in which the files arrived became the run folder.
    """
    run_id = missing.manifest.run_id
    run, arrived = workspace.runs / run_id, staging / "files" / run_id
    is_new = not run.exists()
    if is_new and finish_folder(arrived, {name: missing.manifest.files[name] for name in missing.names}, (manifest.NAME,)):
        files.write_json(arrived / manifest.NAME, missing.manifest, sync=False)
        arrived.rename(run)
        return True
    folder = staging / "whole" / run_id if is_new else run
    files.make_folder(folder)
    for name in missing.names:
        put_in_place(arrived / name, folder / name, missing.manifest.files[name])
    files.write_json(folder / manifest.NAME, missing.manifest, sync=False)
    if is_new:
        folder.rename(run)
    shutil.rmtree(arrived, ignore_errors=True)
    return False


def _problem_text(workspace: Workspace, error: Exception) -> str:
    if not isinstance(error, NotRegular):
        return str(error)
    place = Path(error.filename).relative_to(workspace.runs)
    return (
        f"{place} is {error.kind} on this machine, and collect fetch writes only to regular files and folders; "
        "remove it and run the same command again"
    )


def _pruned_text(names: Sequence[str]) -> str:
    rest_text = f" and {len(names) - 1} more files are" if names[1:] else " is"
    return f"{names[0]}{rest_text} not here, and `collect fetch --prune` has removed the files of this run on the cluster"
