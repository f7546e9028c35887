"""Downloads the runs of a workspace that lies on a remote cluster.

The cluster makes the manifest of each run. The files of a run are transferred into a staging folder, and each file is checked
against the manifest. Only then are the files moved into the run folder, the manifest last. So every run with a manifest on this
machine was checked. If a download is interrupted, the same command resumes it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from collect.fetching import fetch_matrices, manifest
from collect.fetching.manifest import ManifestFile, RunManifest
from collect.fetching.progress import TransferProgress
from collect.fetching.transfer import Rsync, Transfer, finish_folder, put_in_place, those_arrived
from shardlab import files, remote_workspace
from shardlab.errors import InputError, ShardlabError
from shardlab.files import NotRegular
from shardlab.remote_workspace import RemoteWorkspace
from shardlab.run import RUN_ID
from shardlab.rundir import RunDir
from shardlab.state import STATES
from shardlab.workspace import Workspace

STAGING = ".incoming"  # the staging folder; it lies in runs/, so that a file can be moved into its run folder by a rename
TRIES = 3  # how often a run is transferred at most if its files change during the transfer
ASK_S = 3600.0  # time limit for the answer of the cluster, which reads all files of its runs; a lost connection fails earlier
MOST_WORDS = 1000  # the most run ids that are passed on a command line
FIRST = "first"  # the folder in STAGING for the manifests and the descriptions of matrices, which are transferred first
# Options of rsync that transfer whole run folders, except hidden files, which are temporary, and the manifest, which was
# transferred before.
WHOLE = ("--recursive", "--exclude=.*", f"--exclude=/*/{manifest.NAME}")
MOST_FIRST = "64m"  # largest size of a file that rsync transfers into the folder FIRST
WAITING = "another collect fetch is transferring files to this workspace; waiting until that command has ended."


class RemoteRun(msgspec.Struct):
    """One run in the output of `collect fetch --json` on the cluster, with only the fields that the download needs."""

    run: Annotated[str, msgspec.Meta(pattern=RUN_ID.pattern)]  # the run id
    state: str
    complete: bool
    problems: list[str] = []  # how the run on the cluster differs from its manifest
    not_regular: dict[str, str] = {}  # name of an entry that is neither a regular file nor a folder -> its kind
    parts: list[str] = []  # sentences: which node's part of the run is missing, or differs from the files of the first node
    pruned: bool = False  # whether files of the run were removed on the cluster


class Downloaded(msgspec.Struct):
    """The result of downloading one run."""

    state: str
    hashed: int = 0  # number of files that were hashed to check them
    problems: list[str] = []  # how the run on this machine differs from the run on the cluster
    not_regular: dict[str, str] = {}  # name of an entry that is neither a regular file nor a folder -> its kind
    parts: list[str] = []  # sentences: which node's part of the run is missing, or differs from the files of the first node
    changed: list[str] = []  # names of files that did not match the manifest after their transfer


class Missing(msgspec.Struct):
    """A run that may be incomplete on this machine, with the files that have to be transferred."""

    manifest: RunManifest
    names: list[str]  # names of the files that are missing on this machine, or differ here from the manifest
    hashed: int  # number of files on this machine that were hashed to compare them with the manifest
    is_here: bool = False  # whether the run, including its manifest, is already on this machine


def download(workspace: Workspace, patterns: Sequence[str], progress: TransferProgress) -> dict[str, Downloaded]:
    """Download every run whose id matches one of the patterns, or all runs if there are no patterns.

    Returns {run id: result}. The result is empty if the cluster is local, because its runs are already on this machine. A run
    that is equal on this machine and on the cluster is not transferred. Raises ShardlabError if the cluster does not answer or
    the transfer stops.
    """
    there = remote_workspace.known(workspace)
    if there is None:
        return {}
    answered = _ask(there, patterns, progress)
    files.make_folder(workspace.runs)
    with files.locked(workspace.own / "fetch.lock", lambda _descriptor: progress.say(WAITING)) as lock:
        rsync, staging = Rsync(there, lock, progress.is_stopped), _staging(workspace)
        found: dict[str, Downloaded] = {}
        for turn in range(TRIES):
            if turn:
                answered = [
                    run
                    for run in _ask(there, _words(answered, patterns), progress)
                    if run.run in found and found[run.run].changed
                ]
            with files.as_workspace_error("write"):
                results, transfer = _bring(workspace, rsync, staging, answered, there, progress)
            found |= results
            if transfer.stopped:
                raise ShardlabError(_stopped(there, transfer, found))
            answered = [run for run in answered if found[run.run].changed]
            if not answered:
                break
        for run in answered:
            found[run.run].problems += [_unlike(name, transfer) for name in found[run.run].changed]
        fetch_matrices.store(workspace, staging / FIRST / fetch_matrices.SOURCE)
        if not patterns:
            shutil.rmtree(staging, ignore_errors=True)
    return found


def _ask(there: RemoteWorkspace, patterns: Sequence[str], progress: TransferProgress) -> list[RemoteRun]:
    words = [word for pattern in patterns for word in ("--run", pattern)]
    must_stop = progress.while_waiting(f"{there.host}: the cluster reads the files of its runs to make their manifests.")
    found = there.ask("collect", ["fetch", *words], list[RemoteRun], limit_s=ASK_S, must_stop=must_stop)
    for run in found:
        if not RUN_ID.fullmatch(run.run):  # msgspec's own check of the run id also accepts a newline at its end
            raise ShardlabError(f"{there.host}: {run.run!r} is not a run id. Allowed: {RUN_ID.pattern}.")
    return list({run.run: run for run in found}.values())


def _words(runs: Sequence[RemoteRun], patterns: Sequence[str]) -> Sequence[str]:
    return [run.run for run in runs] if len(runs) <= MOST_WORDS else patterns


def _staging(workspace: Workspace) -> Path:
    """Make the staging folder, into which files are transferred. Files that an interrupted download left in its folder
    `files` stay."""
    staging = workspace.runs / STAGING
    with files.as_workspace_error("write"):
        with contextlib.suppress(FileExistsError):
            staging.mkdir(mode=0o700)
        if staging.is_symlink() or not staging.is_dir():
            raise InputError(f"{staging}: is not a folder; remove it and run the same command again.")
        for name in (FIRST, "whole"):
            shutil.rmtree(staging / name, ignore_errors=True)
    return staging


def _bring(
    workspace: Workspace,
    rsync: Rsync,
    staging: Path,
    runs: Sequence[RemoteRun],
    there: RemoteWorkspace,
    progress: TransferProgress,
) -> tuple[dict[str, Downloaded], Transfer]:
    """Transfer the missing files of these runs. If all files of a run match its manifest, they are moved into its folder in
    runs/.

    Returns ({run id: outcome of the transfer of this run}, how the whole transfer ended).
    """
    shutil.rmtree(staging / FIRST, ignore_errors=True)
    names = [f"runs/{run.run}/{manifest.NAME}" for run in runs]
    transfer = rsync.bring(".", staging / FIRST, [*names, *fetch_matrices.NAMES], f"--max-size={MOST_FIRST}")
    if transfer.stopped:
        return {}, transfer
    found = {
        run.run: Downloaded(run.state if run.state in STATES else "unknown", not_regular=run.not_regular, parts=run.parts)
        for run in runs
    }
    wanted: dict[str, Missing] = {}
    for run in runs:
        try:
            missing = _missing(workspace, staging, run)
        except (InputError, NotRegular) as error:
            found[run.run].problems = [_why_not(workspace, error), *(f"on the cluster: {problem}" for problem in run.problems)]
            continue
        found[run.run].hashed = missing.hashed
        if missing.names and run.problems:
            found[run.run].problems = [f"on the cluster: {problem}" for problem in run.problems]
        elif missing.names and run.pruned:
            found[run.run].problems = [_pruned(missing.names)]
        elif not missing.is_here:
            wanted[run.run] = missing
    arrived = staging / "files"
    lacking = {run: _not_arrived(arrived / run, missing.names, missing) for run, missing in wanted.items()}
    count = sum(map(len, lacking.values()))
    report = None
    if count:
        size = sum(wanted[run].manifest.files[name].bytes for run, of_run in lacking.items() for name in of_run)
        of_runs = f"{count:,} files of {sum(map(bool, lacking.values())):,} run(s)"
        progress.say(f"{there.host}: {of_runs}, {size / 2**20:,.1f} MiB")
        report = progress.begin(size)
    transfer = rsync.bring(
        "runs", arrived, _rsync_names(wanted, lacking), *WHOLE, f"--compare-dest={workspace.runs}", report=report
    )
    for run_id, missing in wanted.items():
        found[run_id].hashed += len(missing.names)
        found[run_id].changed = _not_arrived(arrived / run_id, lacking[run_id], missing)
        if not found[run_id].changed:
            _place(workspace, staging, missing)
    return found, transfer


def _rsync_names(wanted: Mapping[str, Missing], lacking: Mapping[str, list[str]]) -> list[str]:
    """The names that are passed to rsync: the name of each missing file, or of the run folder if all files of the run are
    missing.

    With one name per file, rsync takes several times as long for thousands of small files.
    """
    names: list[str] = []
    for run, of_run in lacking.items():
        is_whole = len(of_run) == len(wanted[run].manifest.files)
        names += [run] if is_whole and of_run else [f"{run}/{name}" for name in of_run]
    return names


def _not_arrived(arrived: Path, names: Sequence[str], missing: Missing) -> list[str]:
    """The files of a run that are not in the folder `arrived`, or that differ there from the manifest. names: the files to
    check."""
    there = those_arrived(arrived, {name: missing.manifest.files[name] for name in names})
    return [name for name in names if name not in there]


def _missing(workspace: Workspace, staging: Path, remote: RemoteRun) -> Missing:
    """Compare a run on this machine with its manifest from the cluster. Returns the files that have to be transferred.

    Raises InputError or NotRegular if the run cannot be downloaded.
    """
    run = RunDir(workspace.runs / remote.run)
    try:
        theirs = manifest.received(files.read(staging / FIRST / "runs" / remote.run / manifest.NAME), remote.run)
    except FileNotFoundError:
        raise InputError("the cluster has no manifest of this run") from None
    mine = None
    with contextlib.suppress(InputError, FileNotFoundError):  # if the manifest here is damaged, all files are compared
        mine = manifest.read(run) if manifest.regular(run.path, manifest.NAME) else None
    found = Missing(theirs, [], 0)
    for name, file in theirs.files.items():
        status = manifest.regular(run.path, name)
        if status is None:
            found.names.append(name)
            continue
        here = mine.files.get(name) if mine else None
        if here is None or not manifest.is_as_it_was(here, status):
            content = manifest.hashed(run.path / name, status)
            found.hashed += 1
            if mine is not None and mine.complete and here is not None and _changed_here(run.path / name, content, here):
                # The file is not overwritten. `fetch_run` compares the run with its manifest and reports the difference.
                return Missing(mine, [], found.hashed, True)
            here = content
        if here.sha256 != file.sha256:
            found.names.append(name)
    found.is_here = not found.names and mine is not None and mine.has_same_content(theirs)
    return found


def _changed_here(path: Path, content: ManifestFile, recorded: ManifestFile) -> bool:
    """Whether a file was changed on this machine after it was fetched.

    A file that differs from `recorded` (its entry in the manifest) but is not newer was left by an interrupted transfer.
    """
    return content.sha256 != recorded.sha256 and content.mtime_ns > recorded.mtime_ns and not manifest.only_grew(path, recorded)


def _place(workspace: Workspace, staging: Path, missing: Missing) -> None:
    """Move the transferred files of a run into its folder in runs/, then write its manifest.

    If the run has no folder in runs/ yet, all files are first put together, and the folder appears in runs/ when it is
    complete.
    """
    run_id = missing.manifest.run_id
    run, arrived = workspace.runs / run_id, staging / "files" / run_id
    is_new = not run.exists()
    if is_new and finish_folder(arrived, {name: missing.manifest.files[name] for name in missing.names}, (manifest.NAME,)):
        files.write_json(arrived / manifest.NAME, missing.manifest, sync=False)
        arrived.rename(run)
        return
    folder = staging / "whole" / run_id if is_new else run
    files.make_folder(folder)
    for name in missing.names:
        put_in_place(arrived / name, folder / name, missing.manifest.files[name])
    files.write_json(folder / manifest.NAME, missing.manifest, sync=False)
    if is_new:
        folder.rename(run)
    shutil.rmtree(arrived, ignore_errors=True)


def _why_not(workspace: Workspace, error: Exception) -> str:
    if not isinstance(error, NotRegular):
        return str(error)
    place = Path(error.filename).relative_to(workspace.runs)
    return (
        f"{place} is {error.kind} on this machine, and collect fetch writes only to regular files and folders; "
        "remove it and run the same command again"
    )


def _unlike(name: str, transfer: Transfer) -> str:
    said = f" (rsync: {transfer.error})" if transfer.error else ""
    return f"{name}: the file did not match the cluster's manifest in {TRIES} tries; it may be changing on the cluster{said}"


def _pruned(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more files are" if names[1:] else " is"
    return f"{names[0]}{more} not here, and `collect fetch --prune` has removed the files of this run on the cluster"


def _stopped(there: RemoteWorkspace, transfer: Transfer, found: dict[str, Downloaded]) -> str:
    done = sum(not (run.changed or run.problems) for run in found.values())
    so_far = f"{done} of {len(found)} runs are on this machine and were checked; run" if found else "Run"
    return f"{there.host}: the transfer stopped (rsync: {transfer.error}). {so_far} the same command again to continue."
