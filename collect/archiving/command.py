"""`collect archive` and `collect open`: write an archive of a matrix, and open an archive of another person.

Two archives with the same content have equal zip files, byte by byte.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from collect import atomic_folder
from collect.archiving import anonymous, contents, secret_scan, staging
from collect.archiving.anonymous import Pseudonyms
from collect.reading.load import load_matrix
from shardlab import __version__
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.matrix.expansion import LAST_MATRIX, LastMatrix
from shardlab.terminal.console import Output
from shardlab.workspace import archive, workspace_trust
from shardlab.workspace.archive import ArchivedFile, ArchiveIndex, LeftOutFile
from shardlab.workspace.workspace import Workspace

EARLIEST_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the time that every file gets in the archive: the earliest time that zip can store
UNCOMPRESSED_SUFFIXES = (".gz", ".png", ".parquet")  # of files that are already compressed, so that zip stores them as they are


SUMMARY_NAME = "report/summary.json"


class WrittenArchive(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document of `collect archive`."""

    schema: int
    file: str
    """The path of the archive."""
    bytes: int
    """Size of the archive in bytes."""
    matrix: str
    runs: int
    """Number of runs."""
    files: int
    """Number of files, without archive.json."""
    left_out: list[LeftOutFile]
    """Files that are not in the archive."""
    replaced: dict[str, int]
    """Kind of name, such as `host` -> the number of names of this kind that were replaced (--anonymous)."""
    remaining: dict[str, list[str]]
    """Each replaced name of five or more characters that still occurs inside a longer word -> the files that contain this word
    (--anonymous)."""


class OpenedArchive(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document of `collect open`."""

    schema: int
    folder: str
    """The path of the new workspace."""
    matrix: str
    runs: int
    """Number of runs."""
    created: str
    """When the archive was written (ISO 8601, UTC)."""
    shardlab: str
    """Version of shardlab that wrote the archive."""
    anonymous: bool
    """Whether names were replaced."""
    left_out: list[LeftOutFile]
    """Files that are not in the archive."""
    same_report: bool
    """Whether summary.json of the report that `collect open` wrote equals summary.json of the report in the archive."""


def write_archive(
    workspace: Workspace, matrix: str | None, out_path: str | None, max_gib: float, output: Output, *, anonymize: bool
) -> int:
    """Write an archive of a matrix, and print what it contains. Returns the exit code: 1 if names are left that should be
    replaced.

    matrix: name of the matrix; None: the last matrix. out_path: path of the archive; None: in the workspace, named after the
    matrix. max_gib: the limit of the size in GiB. anonymize: whether to replace names by pseudonyms (--anonymous).

    Raises InputError if the file `out_path` exists and is not an archive, if a name cannot be replaced, or if a file contains
    what looks like a secret; ShardlabError if the files that an archive needs are larger than `max_gib` GiB.
    """
    if not 0 < max_gib <= 2**20:
        raise InputError(f"--max-gib: found {max_gib:.12g}. Allowed: more than 0, up to {2**20}.")
    loaded = load_matrix(workspace, matrix)
    matrix_name = loaded.expansion.name
    archive_path = Path(out_path).absolute() if out_path else workspace.path / f"{matrix_name}{archive.ARCHIVE_SUFFIX}"
    check_replaceable(archive_path)
    cluster_config = cluster.find_cluster(None, workspace.path)
    archived_commands, commands_left_out = contents.choose_commands(workspace, loaded, anonymous=anonymize)
    commands_bytes = sum(command.size_bytes for command in archived_commands)
    max_bytes = int(max_gib * 2**30)
    archive_sources, left_out = contents.choose_files(workspace, loaded, max_bytes, commands_bytes=commands_bytes)
    left_out += commands_left_out
    pseudonyms = anonymous.make_pseudonyms(workspace, loaded, cluster_config) if anonymize else None
    with files.as_workspace_error("write"):
        nearest_folder = next(parent for parent in archive_path.parents if parent.is_dir())
        staging_folder = tempfile.TemporaryDirectory(prefix=f".{archive_path.name}.", suffix=".tmp", dir=nearest_folder)
    with staging_folder as staging_path:
        folder = Path(staging_path)
        left_out += staging.copy_files(folder, archive_sources, pseudonyms)
        staging.pack_commands(folder, loaded, archived_commands)
        left_out += staging.write_descriptions(folder, loaded, cluster_config, pseudonyms)
        staging.finish_workspace(folder, matrix_name, workspace)
        run_ids = Workspace(folder).list_run_ids()
        if pseudonyms is not None:
            replace_names = pseudonyms.replace_names_in_text
            left_out = [LeftOutFile(replace_names(file.name), file.bytes, replace_names(file.why)) for file in left_out]
        index = build_index(folder, matrix_name, run_ids, left_out, anonymous=anonymize)
        secret_scan.check_no_secrets(folder, index)
        files_by_remaining_name = _find_remaining_names(folder, index, pseudonyms) if pseudonyms is not None else {}
        with files.as_workspace_error("write"):
            archive_path.parent.mkdir(parents=True, exist_ok=True)
        size_bytes = write_zip(archive_path, folder, index)
    replaced_count_by_kind = pseudonyms.count_by_kind if pseudonyms is not None else {}
    _print_written_archive(output, archive_path, size_bytes, index, replaced_count_by_kind, files_by_remaining_name)
    output.print_document(
        WrittenArchive(
            schema=1, file=str(archive_path), bytes=size_bytes, matrix=matrix_name, runs=len(run_ids), files=len(index.files),
            left_out=left_out, replaced=replaced_count_by_kind, remaining=files_by_remaining_name,
        )
    )  # fmt: skip
    return 1 if files_by_remaining_name else 0


def open_archive(archive_file: str, out_path: str | None, output: Output, *, trusted: bool) -> int:
    """Check an archive, unpack it into a new workspace, and write the report in this workspace. Returns the exit code.

    archive_file: the archive. out_path: the folder of the new workspace; None: a folder in the current folder, named after the
    archive. trusted: whether to execute code that the archive contains, such as metrics (--trust).
    """
    archive_path = Path(archive_file)
    archive_stem = archive_path.name.removesuffix(archive.ARCHIVE_SUFFIX).removesuffix(".zip")
    workspace_folder = Path(out_path or archive_stem).absolute()
    if workspace_folder.exists() or workspace_folder.is_symlink():
        raise InputError(f"{workspace_folder}: is there already. Allowed with --out: a folder that does not exist.")
    with atomic_folder.replace_folder(workspace_folder, frozenset(), "an archive") as new_folder:
        index = _unpack_files(archive_path, new_folder, _is_unpacked)
        archived_summary = files.read(new_folder / SUMMARY_NAME) if (new_folder / SUMMARY_NAME).exists() else b""
        shutil.rmtree(new_folder / "report", ignore_errors=True)
    opened_workspace = Workspace(workspace_folder)
    code_files = [
        source for name in plugin_source.CODE_FOLDERS for source in plugin_source.list_code_files(opened_workspace.path / name)
    ]
    if trusted and code_files:
        workspace_trust.store_consent(opened_workspace, output.print_remark)
    staging.write_matrix_report(opened_workspace, index.matrix, opened_workspace)
    new_summary = files.read(opened_workspace.path / SUMMARY_NAME)
    is_same_report = _decode_without_time(archived_summary) == _decode_without_time(new_summary)
    unexecuted_files = [] if trusted else code_files
    _print_opened_archive(output, opened_workspace, index, unexecuted_files, is_same_report=is_same_report)
    output.print_document(
        OpenedArchive(
            schema=1, folder=str(workspace_folder), matrix=index.matrix, runs=len(index.runs), created=index.created,
            shardlab=index.shardlab, anonymous=index.anonymous, left_out=index.left_out, same_report=is_same_report,
        )
    )  # fmt: skip
    return 0


@contextmanager
def unpack_as_workspace(archive_file: Path) -> Iterator[Workspace]:
    """Unpack an archive into a temporary folder, which is a workspace until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="shardlab-archive-") as folder:
        _unpack_files(archive_file, Path(folder), lambda name: not name.startswith("report/"))
        yield Workspace(Path(folder))


def _unpack_files(archive_file: Path, folder: Path, is_wanted: Callable[[str], bool]) -> ArchiveIndex:
    """Unpack the files of an archive whose names `is_wanted` accepts. The empty folder becomes a workspace whose last matrix
    is the matrix of the archive."""
    archive_index = archive.unpack_archive(archive_file, folder, is_wanted)
    files.write_json(folder / ".shardlab" / LAST_MATRIX, LastMatrix(schema=1, name=archive_index.matrix))
    return archive_index


def _decode_without_time(summary: bytes) -> dict[str, Any] | None:
    """The content of a summary.json without the time at which it was written; None if it cannot be read."""
    try:
        content = msgspec.json.decode(summary, type=dict[str, Any])
    except DECODE_FAULTS:
        return None
    return {name: value for name, value in content.items() if name != "created_s"}


def _is_unpacked(name: str) -> bool:
    """Whether `collect open` unpacks a file. Of the report only summary.json is unpacked, to compare it with the new report:
    a page of another person could contain any script."""
    return not name.startswith("report/") or name == SUMMARY_NAME


def _find_remaining_names(folder: Path, archive_index: ArchiveIndex, pseudonyms: Pseudonyms) -> dict[str, list[str]]:
    """Search the files of an archive for names that should be replaced, but still stand within longer words.

    Compressed files are not searched. The pages of the report are not searched either: their words stand in its tables too, or
    are shardlab's own, such as `aliceblue` in plotly's script. Returns {name: the files that contain it}.
    """
    files_by_name: dict[str, list[str]] = {}
    for archived_name in archive_index.files:
        if not archived_name.endswith((*UNCOMPRESSED_SUFFIXES, ".html")):
            with files.open_regular(folder / archived_name.removeprefix(archive.WORKSPACE_PREFIX)) as source:
                remaining_names = set[str]().union(*map(pseudonyms.find_remaining, anonymous.read_whole_lines(source)))
            for remaining_name in sorted(remaining_names):
                files_by_name.setdefault(remaining_name, []).append(archived_name)
    return files_by_name


def _print_written_archive(
    output: Output, target: Path, size: int, index: ArchiveIndex, counts: dict[str, int], remaining_names: dict[str, list[str]]
) -> None:
    output.print_line(f"archive: {target}")
    output.print_line(f"{index.matrix}: {len(index.runs)} run(s), {len(index.files)} files, {size / 2**20:.1f} MiB")
    _print_left_out(output, index.left_out)
    if index.anonymous:
        kinds_text = ", ".join(f"{count} {kind}(s)" for kind, count in counts.items()) or "none was found"
        output.print_line(f"replaced names: {kinds_text}. Look into the file before you publish it.")
    for name, paths in remaining_names.items():
        output.print_remark(
            f"{name!r} still stands within longer words in {len(paths)} file(s), such as {paths[0]}", style="red"
        )


def _print_opened_archive(
    output: Output, workspace: Workspace, index: ArchiveIndex, unexecuted_files: Sequence[Path], *, is_same_report: bool
) -> None:
    output.print_line(f"workspace: {workspace.path}")
    output.print_line(f"{index.matrix}: {len(index.runs)} run(s), archived {index.created} by shardlab {index.shardlab}")
    _print_left_out(output, index.left_out)
    output.print_line(f"report: {workspace.report / 'index.html'}")
    if is_same_report:
        output.print_line("The numbers of this report equal those of the report in the archive.")
    else:
        output.print_remark(
            "The numbers of this report are not all equal to those in the archive, for example because another "
            "version of shardlab computed them or the archive's own metrics were not executed.",
            style="yellow",
        )
    if unexecuted_files:
        file_count = len(unexecuted_files)
        output.print_remark(
            f"{file_count} file(s) with code of the author were not executed. If you have read them, allow them with --trust."
        )


def _print_left_out(output: Output, left_out: Sequence[LeftOutFile]) -> None:
    for reason, file_count in Counter(left_out_file.why for left_out_file in left_out).items():
        output.print_line(f"left out: {file_count} file(s): {reason}")
    for left_out_file in left_out:
        output.print_detail(f"left out: {left_out_file.name}")


def check_replaceable(out_path: Path) -> None:
    """Raise InputError if a file exists at `out_path` that is not an archive, because the new archive would overwrite this
    file."""
    if not out_path.exists() and not out_path.is_symlink():
        return
    try:
        archive.read_index(out_path)
    except InputError:
        raise InputError(
            f"{out_path}: is there already and is not an archive. Allowed with --out: a new file, or an archive."
        ) from None


def build_index(
    folder: Path, matrix_name: str, run_ids: Sequence[str], left_out: Sequence[LeftOutFile], *, anonymous: bool
) -> ArchiveIndex:
    """Make the index (archive.json) of an archive of all files in `folder`. anonymous: whether names were replaced."""
    archived_files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and archive.may_contain(name):
            archived_files[archive.WORKSPACE_PREFIX + name] = ArchivedFile(path.stat().st_size, files.compute_file_sha256(path))
    workspace_paths = (name.removeprefix(archive.WORKSPACE_PREFIX) for name in archived_files)
    return ArchiveIndex(
        schema=archive.SCHEMA,
        shardlab=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        matrix=matrix_name,
        matrix_file=next((path for path in workspace_paths if re.fullmatch(r"matrix/.*\.ya?ml", path)), None),
        anonymous=anonymous,
        runs=list(run_ids),
        files=archived_files,
        left_out=list(left_out),
    )


def write_zip(out_path: Path, folder: Path, archive_index: ArchiveIndex) -> int:
    """Write the files of `folder` that the index names to `out_path`, completely or not at all. Returns the size in bytes.

    Raises WorkspaceError if `out_path` cannot be written.
    """
    with files.open_atomic(out_path) as archive_handle, zipfile.ZipFile(archive_handle, "w", zipfile.ZIP_DEFLATED) as zip_file:
        with zip_file.open(_build_zip_entry(archive.INDEX_FILE), "w") as member:
            member.write(files.encode_json(archive_index))
        for name in archive_index.files:
            path = folder / name.removeprefix(archive.WORKSPACE_PREFIX)
            with files.open_regular(path) as source, zip_file.open(_build_zip_entry(name), "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, archive.BLOCK_BYTES)
    return out_path.stat().st_size


def _build_zip_entry(archived_name: str) -> zipfile.ZipInfo:
    zip_entry = zipfile.ZipInfo(archived_name, EARLIEST_ZIP_TIME)
    zip_entry.compress_type = zipfile.ZIP_STORED if archived_name.endswith(UNCOMPRESSED_SUFFIXES) else zipfile.ZIP_DEFLATED
    zip_entry.external_attr = 0o644 << 16
    return zip_entry
