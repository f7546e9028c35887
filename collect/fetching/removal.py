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

from collect.fetching import manifest
from collect.fetching.manifest import RunManifest
from collect.fetching.part_manifest import is_in_use
from collect.fetching.pruning import MARK, is_kept
from collect.loading.records import RunRecords
from shardlab.errors import InputError
from shardlab.files import files, json_file
from shardlab.files.files import NotRegular
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL
from shardlab.terminal import console
from shardlab.workspace.workspace import Workspace


class RemovalRequest(msgspec.Struct):
    """A request to remove files, sent by another machine that has verified its own copies of these files."""

    runs: list[RunManifest]
    is_part: bool
    """Whether the files are a node's parts of runs; then all files are removed, and `is_kept` is not used."""


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


def _remove_run_files(workspace: Workspace, verified: RunManifest, resumed: dict[str, str], *, is_part: bool) -> RemovedFiles:
    run, removed = RunDir(workspace.runs / verified.run_id), RemovedFiles(verified.run_id)
    removed.why = _refusal_reason(run, resumed, is_part=is_part)
    if removed.why:
        return removed
    with files.as_workspace_error("write"):
        if not is_part:
            # The file MARK is written first. Otherwise, after an interruption, the removed files would look like lost files.
            files.write_atomic(run.path / MARK, b"")
        for name, file in verified.files.items():
            try:
                status = manifest.regular_file_status(run.path, name)
            except NotRegular:
                status = None
            if is_kept(name) and not is_part:
                continue
            if status is None or not manifest.is_unchanged(file, status):
                removed.why = f"{name} changed after it was verified"
                continue
            (run.path / name).unlink()
            removed.files, removed.bytes = removed.files + 1, removed.bytes + file.bytes
        if is_part and not manifest.list_files(run.path).regular:
            (run.path / ".part").unlink(missing_ok=True)
        _remove_empty_folders(run.path, including_root=is_part)
    return removed


def _refusal_reason(run: RunDir, resumed: dict[str, str], *, is_part: bool) -> str:
    """The reason, as a clause, why no file of a run may be removed on this machine; '' if files may be removed.

    resumed: the result of `_find_resumed_runs`.
    """
    if run.path.is_symlink() or not run.run_json.is_file():
        return "there is no such run"
    if is_in_use(run.path):
        return "a process works in its folder"
    if is_part:
        return "this is the folder in which its parts are gathered" if run.claim.exists() else ""
    records = RunRecords.read(run, "open")
    if records.verdict.state not in FINAL or records.waits:
        return f"it has not ended: {records.verdict.state}"
    return f"{resumed[run.run_id]}, which has not ended, resumes from it" if run.run_id in resumed else ""


def _find_resumed_runs(workspace: Workspace) -> dict[str, str]:
    """Find the runs from which another run will resume: {id of a run: id of the run that will resume from it}.

    A run that has ended does not resume any more, so it is not considered.
    """
    resumed: dict[str, str] = {}
    for run in workspace.all_runs():
        with contextlib.suppress(InputError, FileNotFoundError):  # a run that cannot be read is skipped
            if resumed_ids := run.read_run().resume:
                resumed |= dict.fromkeys(resumed_ids, run.run_id) if run.judge().state not in FINAL else {}
    return resumed


def _remove_empty_folders(folder: Path, *, including_root: bool) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # a folder that still has files stays
                path.rmdir()
    if including_root:
        with contextlib.suppress(OSError):
            folder.rmdir()


def main() -> int:
    """Remove the files that standard input names, print the result, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.removal", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    request = json_file.decode_standard_input(sys.stdin.buffer.read(), RemovalRequest, "a request of this version")
    for run_manifest in request.runs:
        manifest.check_received(run_manifest, run_manifest.run_id)
    resumed = {} if request.is_part else _find_resumed_runs(workspace)
    removed = [_remove_run_files(workspace, run_manifest, resumed, is_part=request.is_part) for run_manifest in request.runs]
    console.Output.from_arguments(arguments).print_document(removed)
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
