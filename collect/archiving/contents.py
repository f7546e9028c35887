"""Chooses the files of a workspace that go into an archive, and gives the reason for each file that is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from collect.archiving import secret_scan
from collect.reading.load import LoadedMatrix
from shardlab.errors import ShardlabError
from shardlab.files import files, plugin_source
from shardlab.matrix import matrix as matrix_file
from shardlab.matrix.command import SentFolder
from shardlab.plugins import command_copies
from shardlab.runs.state import FINAL_STATES
from shardlab.transfer import manifest
from shardlab.workspace import archive, workspace_trust
from shardlab.workspace.archive import LeftOutFile
from shardlab.workspace.workspace import Workspace

MATRIX_FOLDER = "matrix"
# Files of a run that never go into an archive: checkpoints are large, and no comparison of runs needs them.
NEVER_ARCHIVED_PATTERNS = ("checkpoints/*",)
# (name of a group, patterns of its files). While the archive is larger than its limit, group after group is left out. The first
# groups have the largest files, and no metric needs them. Metrics of memory, energy and network need the last one, telemetry.
DISPENSABLE_GROUPS = (
    ("memory snapshots", ("memory/*.snapshot.json.gz",)),
    ("profiler traces", ("trace/*",)),
    ("logs", ("log/*",)),
    ("telemetry", ("samples/*",)),
)


class ArchiveSource(msgspec.Struct, frozen=True):
    """A file that goes into an archive."""

    archive_path: str
    """The path of the file in the archive, below `workspace/`."""
    path: Path
    size_bytes: int


class ArchivedCommand(msgspec.Struct, frozen=True):
    """The folder of a command that goes into an archive."""

    sent_folder: SentFolder
    """How whoever repeats the runs finds the files."""
    frozen_copy: Path
    """The frozen copy of the folder in the workspace."""
    size_bytes: int
    """What the copy adds to the archive, before compression."""


def choose_files(
    workspace: Workspace, loaded: LoadedMatrix, max_bytes: int, *, commands_bytes: int = 0
) -> tuple[list[ArchiveSource], list[LeftOutFile]]:
    """Choose the files of an archive. Returns (files that go into the archive, files that are left out with the reasons).

    max_bytes: the limit of the sum of the sizes of all files, uncompressed. commands_bytes: how many bytes the files of
    commands take of it. Raises ShardlabError if the files that every archive needs are together larger than the limit.
    """
    sources, left_out = _choose_run_files(loaded)
    sources += _choose_matrix_files(workspace, loaded, left_out)
    sources += _choose_code_files(workspace)
    for group_name, patterns in DISPENSABLE_GROUPS:
        if commands_bytes + sum(archive_source.size_bytes for archive_source in sources) <= max_bytes:
            break
        reason = f"{group_name} were left out to keep the archive below its limit"
        left_out += [
            LeftOutFile(archive_source.archive_path, archive_source.size_bytes, reason)
            for archive_source in sources
            if _matches_in_run(archive_source.archive_path, patterns)
        ]
        sources = [archive_source for archive_source in sources if not _matches_in_run(archive_source.archive_path, patterns)]
    needed_bytes = commands_bytes + sum(archive_source.size_bytes for archive_source in sources)
    if needed_bytes > max_bytes:
        raise ShardlabError(
            f"the records of the runs have {needed_bytes / 2**30:.3g} GiB without traces, logs and telemetry, and the "
            f"limit is {max_bytes / 2**30:.3g} GiB. Set a higher limit with --max-gib, or choose another matrix with --matrix."
        )
    return sources, left_out


def _matches_in_run(archive_path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, such as `runs/ID/trace/rank-00000.json.gz`, is a file of a run that matches a pattern."""
    top_folder, _, path_in_runs = archive_path.partition("/")
    return top_folder == "runs" and any(fnmatchcase(path_in_runs.partition("/")[2], pattern) for pattern in patterns)


def _choose_run_files(loaded: LoadedMatrix) -> tuple[list[ArchiveSource], list[LeftOutFile]]:
    """Choose the files of all runs that have ended. Returns (files that go into the archive, files that are left out).

    manifest.json of a run is in neither list, because the archive gets a new manifest for each run.
    """
    archive_sources: list[ArchiveSource] = []
    left_out: list[LeftOutFile] = []
    for run in loaded.runs:
        run_path = f"runs/{run.run_id}"
        if run.verdict.state not in FINAL_STATES:
            left_out.append(LeftOutFile(f"{run_path}/", None, f"the run is {run.verdict.state}"))
            continue
        listing = manifest.list_files(run.folder.path)
        left_out += [
            LeftOutFile(f"{run_path}/{path}", None, f"it is {file_kind}") for path, file_kind in listing.other_kinds.items()
        ]
        for path, file_status in listing.status_by_file.items():
            archive_path = f"{run_path}/{path}"
            if _matches_in_run(archive_path, NEVER_ARCHIVED_PATTERNS):
                left_out.append(LeftOutFile(archive_path, file_status.st_size, "checkpoints are never archived"))
            elif not archive.may_contain(archive_path):
                left_out.append(LeftOutFile(archive_path, file_status.st_size, "its name is not allowed in an archive"))
            else:
                archive_sources.append(ArchiveSource(archive_path, run.folder.path / path, file_status.st_size))
    return archive_sources, left_out


def _choose_matrix_files(workspace: Workspace, loaded: LoadedMatrix, left_out: list[LeftOutFile]) -> list[ArchiveSource]:
    """The matrix file, and the model files that it names. If it cannot be read, the reason is added to `left_out`."""
    path = workspace.path / loaded.expansion.path
    try:
        loaded_matrix = matrix_file.load_matrix(path)
    except ShardlabError as error:
        left_out.append(LeftOutFile(f"{MATRIX_FOLDER}/{path.name}", None, f"the matrix file cannot be read any more: {error}"))
        return []
    file_names = [path.name, *(model.path for model in loaded_matrix.models.values() if model.path is not None)]
    return _build_sources(MATRIX_FOLDER, path.parent, dict.fromkeys(file_names))


def choose_commands(
    workspace: Workspace, loaded: LoadedMatrix, *, anonymous: bool
) -> tuple[list[ArchivedCommand], list[LeftOutFile]]:
    """Choose the folders of commands whose files go into an archive, as they were submitted last. Returns (these folders, those
    that are left out with the reasons)."""
    try:
        workload_by_command = matrix_file.load_matrix(workspace.path / loaded.expansion.path).command_by_name
    except ShardlabError:  # `choose_files` says so
        workload_by_command = {}
    digest_by_command = {
        cell.cell.workload: cell.cell.workload_code for cell in loaded.cells if cell.cell.command and cell.cell.workload_code
    }
    commands: list[ArchivedCommand] = []
    left_out: list[LeftOutFile] = []
    for name, workload in workload_by_command.items():
        digest = digest_by_command.get(name)
        copy = command_copies.find_copy(
            workspace_trust.find_copies_folder(workspace, workspace_trust.ANSWERS_FOLDER), digest or ""
        )
        if anonymous:
            left_out.append(LeftOutFile(workload.folder, None, f"the files of the command {name} may contain names"))
        elif digest is None or not command_copies.is_intact(copy, digest):
            left_out.append(
                LeftOutFile(workload.folder, None, f"this workspace has no undamaged copy of the files of the command {name}")
            )
        elif (secret := secret_scan.find_secret(copy, command_copies.list_copy(copy))) is not None:
            reason = f"the files of the command {name} seem to have a secret: {secret}"
            left_out.append(LeftOutFile(workload.folder, None, reason))
        else:
            stated_keys = (workload.folder, workload.exclude, workload.include, workload.name)
            is_chosen = any(command.sent_folder.digest == digest for command in commands)  # two commands may have one folder
            size_bytes = 0 if is_chosen else sum(path.lstat().st_size for path in copy.rglob("*"))
            commands.append(ArchivedCommand(SentFolder(*stated_keys, name=name, digest=digest), copy, size_bytes))
    return commands, left_out


def _choose_code_files(workspace: Workspace) -> list[ArchiveSource]:
    """The Python files of the workspace's own workloads, strategies and metrics, and the helper files that they import."""
    code_sources = []
    for folder in plugin_source.CODE_FOLDERS:
        paths = plugin_source.list_code_files(workspace.path / folder)
        code_sources += _build_sources(folder, workspace.path / folder, [path.name for path in paths])
    return code_sources


def _build_sources(top_folder: str, folder: Path, file_names: Iterable[str]) -> list[ArchiveSource]:
    with files.as_workspace_error("read"):
        return [ArchiveSource(f"{top_folder}/{file}", folder / file, (folder / file).stat().st_size) for file in file_names]
