"""`collect fetch`: copies runs from the cluster, checks their files, and prints what was fetched.

Before the cluster starts its program, only the modules are imported that asking it needs; the others are imported meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from collect.reading import unreadable_runs
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.remote import remote_workspace
from shardlab.remote.remote_conversation import RemoteConversation
from shardlab.runs.rundir import RunDir
from shardlab.terminal.console import Output
from shardlab.transfer.messages import AskedRuns
from shardlab.workspace import handles, workspace_trust
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collect.fetching.fetched_run import DownloadedRun, FetchedRun
    from collect.fetching.progress import TransferProgress

WAITING_REMARK = "another collect fetch is transferring files to this workspace; waiting until that command has ended."


def fetch_and_print(
    workspace: Workspace, patterns: Sequence[str], output: Output, *, must_prune: bool, is_confirmed: bool
) -> int:
    """Fetch runs, print a table of them, and return the exit code: 1 if a run is damaged or was not fetched completely.

    patterns: shell patterns of run ids; if there are none, all runs are fetched. must_prune: whether to remove the fetched
    files on the cluster (--prune). is_confirmed: whether the files are removed without asking the user (--yes). Raises
    InputError if --prune is not possible or cannot be confirmed, or if a pattern matches no run."""
    if must_prune:
        from collect.fetching import prune

        prune.must_be_stored_elsewhere(workspace)
        if not is_confirmed and not sys.stdin.isatty():
            raise InputError("--prune was not confirmed. Allowed: the option --yes, or the answer `yes` on a terminal.")
    with _open_conversation(workspace, patterns, output) as conversation:
        from collect.fetching import progress

        with progress.show_progress(output) as transfer_progress:
            fetched_runs = _fetch_runs(workspace, patterns, conversation, transfer_progress)
    cell_handles = workspace.number_cells()
    headings = ["Run", "State", "Files (n)", "Size (KiB)", "Hashed (n)", "Truncated files (n)", "Corrupt lines (n)"]
    run_rows = [
        [handles.make_handle(run.run, cell_handles), run.run, run.state]
        + [f"{shown_count:,}" for shown_count in (run.files, run.bytes // 1024, run.hashed, run.truncated, run.corrupt)]
        for run in fetched_runs
    ]
    output.print_table("", [handles.HEADING, *headings], run_rows)
    for run in fetched_runs:
        if run.damage:
            output.print_remark(f"{run.run}: damaged records: {run.damage}", style="yellow")
        for file_name in run.added:
            output.print_detail(f"{run.run}: {file_name}: the file is new since the run was fetched")
        for problem in run.problems:
            output.print_remark(f"{run.run}: {problem}", style="red")
        for part_sentence in run.parts:
            output.print_remark(f"{run.run}: {part_sentence}", style="red")
        for file_name, entry_kind in run.not_regular.items():
            output.print_remark(
                f"{run.run}: {file_name} is {entry_kind}; only regular files and folders with names in UTF-8 are fetched",
                style="red",
            )
    changed_count = sum(bool(run.problems) for run in fetched_runs)
    if changed_count:
        output.print_remark(
            f"{changed_count} of {len(fetched_runs)} runs differ from their manifest.json or from the cluster; their "
            "manifest.json was not changed. To resolve this for a run, remove its manifest.json and run the same command again."
        )
    elif not fetched_runs:
        output.print_remark(f"{workspace.runs}: no runs yet.")
    unreadable_runs.print_unreadable_runs(output, [(RunDir(workspace.runs / run.run), run.unreadable) for run in fetched_runs])
    is_freed = True
    if must_prune:
        is_freed = _remove_fetched(output, workspace, fetched_runs, is_confirmed=is_confirmed)
    output.print_document(fetched_runs)
    return 0 if is_freed and all(run.is_sound for run in fetched_runs) else 1


def _remove_fetched(output: Output, workspace: Workspace, fetched_runs: Sequence[FetchedRun], *, is_confirmed: bool) -> bool:
    """Remove the files of fetched runs on the cluster or its nodes, after the user has agreed.

    is_confirmed: whether the user has already agreed and is not asked. Returns False if files that should be removed were not
    removed; True if all were removed, or the user did not agree.
    """
    from collect.fetching import progress, prune

    with progress.show_progress(output) as transfer_progress:
        verified_places = prune.verify_files(workspace, fetched_runs, transfer_progress)
    for place in verified_places:
        if place.runs:
            files_text = f"{place.file_count:,} files of {len(place.runs):,} run(s)"
            files_text += f", {place.files_bytes / 2**20:,.1f} MiB"
            output.print_remark(f"{place.where}: {files_text}: their checksums are those of the files on this machine.")
    if not any(place.runs for place in verified_places):
        output.print_remark("There is nothing to remove.")
    elif not is_confirmed and output.ask("Remove these files there? Type yes: ") != "yes":
        output.print_remark("Nothing was removed.")
        return True
    with progress.show_progress(output) as transfer_progress:
        freed_places = prune.remove_verified_files(verified_places, transfer_progress)
    for run in fetched_runs:
        run.freed = [freed_place for freed_place in freed_places if freed_place.run == run.run]
    for freed_place in freed_places:
        if freed_place.why:
            output.print_remark(f"{freed_place.where}: files of {freed_place.run} stay: {freed_place.why}", style="red")
    for place_name in dict.fromkeys(freed_place.where for freed_place in freed_places if freed_place.files):
        removed_in_place = [freed_place for freed_place in freed_places if freed_place.where == place_name]
        file_count, files_bytes = (
            sum(freed_place.files for freed_place in removed_in_place),
            sum(freed_place.bytes for freed_place in removed_in_place),
        )
        output.print_remark(f"{place_name}: {file_count:,} files removed, {files_bytes / 2**20:,.1f} MiB freed")
    return not any(freed_place.why for freed_place in freed_places)


@contextmanager
def _open_conversation(workspace: Workspace, patterns: Sequence[str], output: Output) -> Iterator[RemoteConversation | None]:
    """During the block, the cluster executes collect.fetching.sender, which sends runs, and no other `collect fetch`
    transfers files to this workspace.

    patterns: shell patterns of the ids of the runs that the cluster offers; if there are none, it offers all runs.
    Yields the conversation with the program, or None if the cluster is local, because its runs are already in this workspace.
    Raises ShardlabError if the login fails.
    """
    remote_cluster = remote_workspace.read_remote_workspace(workspace)
    if remote_cluster is None:
        yield None
        return
    workspace_trust.must_be_allowed(workspace, f"log in to {remote_cluster.host}")
    files.make_folder(workspace.runs)
    with (
        files.hold_lock(workspace.shardlab_folder / "fetch.lock", lambda _descriptor: output.print_remark(WAITING_REMARK)),
        RemoteConversation(remote_cluster, "collect.fetching.sender", "collect fetch") as conversation,
    ):
        conversation.send(AskedRuns(list(patterns)))
        yield conversation


def _fetch_runs(
    workspace: Workspace, patterns: Sequence[str], conversation: RemoteConversation | None, progress: TransferProgress
) -> list[FetchedRun]:
    """Fetch every run whose id matches one of the patterns, or all runs if there are no patterns.

    The runs of a local cluster are already in the workspace, so only their manifests are written. The runs of a remote cluster
    are downloaded first. If each node has its own part of a run's folder, the first node gathers the parts.

    conversation: as `_open_conversation` yields it for these patterns. Raises InputError if a pattern matches no run.
    """
    from collect.fetching import fetched_run, node_parts, side_by_side

    downloads_by_run: dict[str, DownloadedRun] = {}
    if conversation is not None:
        from collect.fetching import download

        downloads_by_run = download.download_runs(workspace, patterns, conversation, progress)
    all_run_ids = sorted({*workspace.list_run_ids(), *downloads_by_run})
    matching_run_ids = workspace.match_runs(patterns, run_ids=all_run_ids) if patterns else all_run_ids
    part_sentences_by_run = {run_id: run.parts for run_id, run in downloads_by_run.items()}
    part_sentences_by_run |= node_parts.gather_parts_if_needed(
        workspace, [run_id for run_id in matching_run_ids if run_id not in downloads_by_run], progress
    )

    def fetch_one_run(run_id: str) -> FetchedRun:
        return fetched_run.fetch_run(
            RunDir(workspace.runs / run_id), downloads_by_run.get(run_id), part_sentences_by_run.get(run_id, [])
        )

    return list(side_by_side.map_in_threads(fetch_one_run, matching_run_ids))
