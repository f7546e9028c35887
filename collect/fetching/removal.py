"""Removes files of runs on this machine. Another machine, which verified its own copies of the files, runs this program.

    python -m collect.fetching.removal --workspace DIR --json

The other machine is the one on which the user runs `collect fetch --prune` (collect.fetching.prune). Standard input: a
RemovalRequest. Standard output: a RemovedFiles for each run. A file is removed only if it still has the size and the time that
it had when it was hashed for the other machine.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from collect.fetching.part_manifest import is_in_use
from collect.fetching.pruning import PRUNED_MARK, is_kept_by_cluster
from collect.loading.records import RunRecords
from shardlab.errors import InputError
from shardlab.files import files, json_file
from shardlab.files.files import NotRegular
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES
from shardlab.terminal import console
from shardlab.transfer import manifest
from shardlab.transfer.manifest import RunManifest
from shardlab.workspace.workspace import Workspace


class RemovalRequest(msgspec.Struct):
    """A request to remove files, sent by another machine that has verified its own copies of these files."""

    runs: list[RunManifest]
    is_part: bool
    """Whether the files are a node's parts of runs; then all files are removed, and `is_kept_by_cluster` is not used."""


class RemovedFiles(msgspec.Struct):
    """How many files of a run were removed, or why files were not removed."""

    run: str
    """The run id."""
    files: int = 0
    """Number of files that were removed."""
    bytes: int = 0
    """Size of these files in bytes."""
    why: str = ""
    """The reason, as a clause, if files of the run were not removed; '' if all were removed."""


def _remove_run_files(
    workspace: Workspace, run_manifest: RunManifest, resuming_run_by_id: dict[str, str], *, is_part: bool
) -> RemovedFiles:
    run_dir, removed_files = RunDir(workspace.runs / run_manifest.run_id), RemovedFiles(run_manifest.run_id)
    removed_files.why = _find_refusal_reason(run_dir, resuming_run_by_id, is_part=is_part)
    if removed_files.why:
        return removed_files
    with files.as_workspace_error("write"):
        if not is_part:
            # The file PRUNED_MARK is written first. Otherwise, after an interruption, the removed files would look like lost
            # files.
            files.write_atomic(run_dir.path / PRUNED_MARK, b"")
        for file_name, manifest_file in run_manifest.files.items():
            try:
                file_status = manifest.read_file_status(run_dir.path, file_name)
            except NotRegular:
                file_status = None
            if is_kept_by_cluster(file_name) and not is_part:
                continue
            if file_status is None or not manifest.is_unchanged(manifest_file, file_status):
                removed_files.why = f"{file_name} changed after it was verified"
                continue
            (run_dir.path / file_name).unlink()
            removed_files.files, removed_files.bytes = removed_files.files + 1, removed_files.bytes + manifest_file.bytes
        if is_part and not manifest.list_files(run_dir.path).status_by_file:
            (run_dir.path / ".part").unlink(missing_ok=True)
        _remove_empty_folders(run_dir.path, removes_root=is_part)
    return removed_files


def _find_refusal_reason(run_dir: RunDir, resuming_runs: dict[str, str], *, is_part: bool) -> str:
    """The reason, as a clause, why no file of a run may be removed on this machine; '' if files may be removed.

    resuming_runs: the result of `_find_resumed_runs`.
    """
    if run_dir.path.is_symlink() or not run_dir.run_json.is_file():
        return "there is no such run"
    if is_in_use(run_dir.path):
        return "a process works in its folder"
    if is_part:
        return "this is the folder in which its parts are gathered" if run_dir.claim.exists() else ""
    records = RunRecords.read(run_dir, "open")
    if records.verdict.state not in FINAL_STATES or records.was_requeued:
        return f"it has not ended: {records.verdict.state}"
    return f"{resuming_runs[run_dir.run_id]}, which has not ended, resumes from it" if run_dir.run_id in resuming_runs else ""


def _find_resumed_runs(workspace: Workspace) -> dict[str, str]:
    """Find the runs from which another run will resume: {id of a run: id of the run that will resume from it}.

    A run that has ended does not resume any more, so it is not considered.
    """
    resuming_runs: dict[str, str] = {}
    for run_dir in workspace.list_run_dirs():
        with contextlib.suppress(InputError, FileNotFoundError):  # a run that cannot be read is skipped
            if resumed_ids := run_dir.read_run().resume:
                resuming_runs |= dict.fromkeys(resumed_ids, run_dir.run_id) if run_dir.judge().state not in FINAL_STATES else {}
    return resuming_runs


def _remove_empty_folders(folder: Path, *, removes_root: bool) -> None:
    for entry_path in sorted(folder.rglob("*"), reverse=True):
        if entry_path.is_dir() and not entry_path.is_symlink():
            with contextlib.suppress(OSError):  # a folder that still has files stays
                entry_path.rmdir()
    if removes_root:
        with contextlib.suppress(OSError):
            folder.rmdir()


def main() -> int:
    """Remove the files that standard input names, print the result, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.removal", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    removal_request = json_file.decode_standard_input(sys.stdin.buffer.read(), RemovalRequest, "a request of this version")
    for run_manifest in removal_request.runs:
        manifest.check_received_manifest(run_manifest, run_manifest.run_id)
    resuming_run_by_id = {} if removal_request.is_part else _find_resumed_runs(workspace)
    removed_files = [
        _remove_run_files(workspace, run_manifest, resuming_run_by_id, is_part=removal_request.is_part)
        for run_manifest in removal_request.runs
    ]
    console.Output.from_arguments(arguments).print_document(removed_files)
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
