"""Defines the manifest of a run: a list of its files with their SHA-256, which shows whether a file of the run was changed
later."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec

from shardlab.errors import InputError
from shardlab.files import files, json_file
from shardlab.record_types import Count, Integer, RunId, Sha256
from shardlab.runs.rundir import WORK_FOLDER, RunDir

MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = 1
BLOCK_BYTES = 1 << 20  # bytes that are read and hashed at a time
MOST_NAME_LENGTH = 1000  # the most characters that the name of a file may have
INVALID_NAME_TEXT = "the cluster names {!r}, which is not a valid file name in a run"


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of a run at the time when it was hashed."""

    bytes: Count
    """Size of the file in bytes."""
    mtime_ns: Integer
    """Time of the last change, in ns since the epoch."""
    sha256: Sha256
    """SHA-256 of the content of the file."""


class RunManifest(msgspec.Struct):
    """The content of manifest.json."""

    schema: int
    run_id: RunId
    files: dict[str, ManifestFile]
    """By name; a name is a path relative to the run folder."""
    complete: bool
    """Whether the run had ended when the manifest was made, so that its files should not change any more."""

    def has_same_content(self, other_manifest: RunManifest) -> bool:
        """Whether this manifest lists every file of `other_manifest` with the same content, and has the same value of
        `complete`."""
        has_files = all(
            name in self.files and self.files[name].sha256 == file.sha256 for name, file in other_manifest.files.items()
        )
        return has_files and self.complete == other_manifest.complete


class FolderListing(msgspec.Struct):
    """The entries of a run folder."""

    status_by_file: dict[str, os.stat_result] = {}
    """Name of a regular file -> its status."""
    other_kinds: dict[str, str] = {}
    """Name -> kind of each entry that a manifest cannot contain: an entry that is neither a regular file nor a folder, or whose
    name is not valid UTF-8."""


class ManifestDifference(msgspec.Struct):
    """How a run that has ended differs from its manifest. Files are given by name."""

    changed: list[str] = []
    """Files whose content changed."""
    vanished: list[str] = []
    """Files that are missing."""
    added: list[str] = []
    """Files that are not in the manifest."""
    hashed_count: int = 0
    """Number of files that had to be read for the comparison."""

    @property
    def problem_clauses(self) -> list[str]:
        """The differences in words: one clause for each file that changed or is missing."""
        changed_clauses = [f"{name}: its content changed" for name in self.changed]
        return changed_clauses + [f"{name}: the file is missing" for name in self.vanished]


def read_manifest(run_dir: RunDir) -> RunManifest | None:
    """The manifest of a run, or None if the run has no manifest. Raises InputError if the manifest is damaged."""
    return json_file.read_json(
        run_dir.path / MANIFEST_FILE, RunManifest, "is not a manifest of this version: {}; remove it to make a new one."
    )


def check_received_manifest(run_manifest: RunManifest, run_id: str) -> None:
    """Check a manifest that another machine made. Raises InputError if it is the manifest of another run, or if a name in it
    is not an allowed path. The check is strict, because the names will be used as paths on this machine."""
    if run_manifest.schema != MANIFEST_SCHEMA or run_manifest.run_id != run_id:
        id_text = f"{run_manifest.schema} and run id {run_manifest.run_id!r}"
        raise InputError(f"the cluster's manifest has schema {id_text}. Expected: {MANIFEST_SCHEMA} and {run_id!r}")
    for name in run_manifest.files:
        check_received_name(name)
    folder_names = {name.rpartition("/")[0] for name in run_manifest.files}
    while folder_names:
        if files_and_folders := sorted(folder_names & run_manifest.files.keys()):  # a file cannot be a folder, too
            raise InputError(INVALID_NAME_TEXT.format(files_and_folders[0][:100]))
        folder_names = {folder.rpartition("/")[0] for folder in folder_names if "/" in folder}


def check_received_name(file_name: str) -> None:
    """Check the name of a file that another machine sent. Raises InputError if a file of a run may not have this name."""
    if not _is_valid_name(file_name):
        raise InputError(INVALID_NAME_TEXT.format(file_name[:100]))


def _is_valid_name(file_name: str) -> bool:
    """Whether a file of a run may have this name.

    Not allowed: names outside of the run folder, the name of the manifest, and hidden names, because hidden files are temporary
    and not part of a run.
    """
    # These conditions are fast, because a run may have thousands of files. Together they exclude an empty part between slashes,
    # and a part that begins with a dot.
    has_hidden_part = file_name.startswith(("/", ".")) or file_name.endswith("/") or "//" in file_name or "/." in file_name
    is_manifest = file_name == MANIFEST_FILE or file_name.startswith(f"{MANIFEST_FILE}/")
    return 0 < len(file_name) <= MOST_NAME_LENGTH and file_name.isprintable() and not has_hidden_part and not is_manifest


def write_manifest(run_dir: RunDir, manifest: RunManifest) -> None:
    """Write manifest.json of a run."""
    files.write_json(run_dir.path / MANIFEST_FILE, manifest)


def make_manifest(
    run_dir: RunDir, listing: FolderListing, *, is_complete: bool, earlier_manifest: RunManifest | None = None
) -> RunManifest:
    """Make the manifest of a run: hash every file that `listing` contains. Raises WorkspaceError if a file cannot be read.

    earlier_manifest: an earlier manifest. A file that still has the size and the time in this manifest is not hashed again.
    """
    file_by_name: dict[str, ManifestFile] = {}
    with files.as_workspace_error("read"):
        for name, status in listing.status_by_file.items():
            old_file = earlier_manifest.files.get(name) if earlier_manifest else None
            try:
                file_by_name[name] = (
                    old_file if old_file and is_unchanged(old_file, status) else hash_file(run_dir.path / name, status)
                )
            except FileNotFoundError:  # the run is still going on and removed the file
                continue
    return RunManifest(MANIFEST_SCHEMA, run_dir.run_id, file_by_name, is_complete)


def compare_with_manifest(
    run_dir: RunDir, listing: FolderListing, old_manifest: RunManifest
) -> tuple[RunManifest, ManifestDifference]:
    """Compare a run with its manifest `old_manifest`. Returns (manifest of the run as it is now, difference from
    `old_manifest`).

    Only files whose size or time changed are read again. An event file that grew does not count as a difference, because events
    may be appended even after the end of a run.
    """
    difference = ManifestDifference()
    current_file_by_name: dict[str, ManifestFile] = {}
    with files.as_workspace_error("read"):
        for name, file_status in listing.status_by_file.items():
            old_file = old_manifest.files.get(name)
            if old_file and is_unchanged(old_file, file_status):
                current_file_by_name[name] = old_file
                continue
            current_file_by_name[name] = hash_file(run_dir.path / name, file_status)
            difference.hashed_count += 1
            if old_file is None:
                difference.added.append(name)
            elif current_file_by_name[name].sha256 != old_file.sha256 and not only_appended(run_dir.path / name, old_file):
                difference.changed.append(name)
    difference.vanished = sorted(old_manifest.files.keys() - current_file_by_name.keys())
    return RunManifest(MANIFEST_SCHEMA, run_dir.run_id, current_file_by_name, True), difference


def list_files(folder: Path) -> FolderListing:
    """List the entries of a run folder, ordered by name. Hidden files and folders are not listed, because they are temporary,
    and neither is the working folder of a command.

    Raises WorkspaceError if a folder cannot be read.
    """
    listing = FolderListing()
    with files.as_workspace_error("read"):
        _list_folder(folder, "", listing)
    return listing


def is_unchanged(manifest_file: ManifestFile, file_status: os.stat_result) -> bool:
    """Whether a file still has the size and the time that it had when it was hashed."""
    return (manifest_file.bytes, manifest_file.mtime_ns) == (file_status.st_size, file_status.st_mtime_ns)


def hash_file(path: Path, file_status: os.stat_result) -> ManifestFile:
    """Hash a file. file_status: the size and time of the file before it is read, so that a change during the reading will be
    noticed."""
    return ManifestFile(file_status.st_size, file_status.st_mtime_ns, compute_digest(path))


def compute_digest(path: Path | str, hashed_bytes: int | None = None) -> str:
    """The SHA-256 of a regular file, or of its first `hashed_bytes` bytes.

    Raises OSError if the file cannot be read, and NotRegular if it is not a regular file.
    """
    descriptor, file_bytes = files.open_descriptor(path)
    try:
        if file_bytes < BLOCK_BYTES:  # one read: a run may have thousands of small files
            file_content = os.read(descriptor, BLOCK_BYTES)
            if len(file_content) == file_bytes:
                return hashlib.sha256(file_content[:hashed_bytes]).hexdigest()
            os.lseek(descriptor, 0, os.SEEK_SET)  # the file changed since it was opened, so it is read from its start again
        with open(descriptor, "rb", buffering=0, closefd=False) as open_file:
            if hashed_bytes is None:
                return hashlib.file_digest(open_file, "sha256").hexdigest()
            sha256 = hashlib.sha256()
            while hashed_bytes and (block := open_file.read(min(BLOCK_BYTES, hashed_bytes))):
                sha256.update(block)
                hashed_bytes -= len(block)
            return sha256.hexdigest()
    finally:
        os.close(descriptor)


def read_file_status(folder: Path, file_name: str) -> os.stat_result | None:
    """The status of the regular file `file_name` in a folder, or None if there is no entry of this name.

    file_name: a path relative to the folder. Raises NotRegular if the entry is not a regular file, or if `folder` or any folder
    on the path is not a folder."""
    entry_path = str(folder)
    for name_part in file_name.split("/"):
        try:
            folder_mode = os.lstat(entry_path).st_mode
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(folder_mode):
            raise files.NotRegular(entry_path, files.describe_file_kind(folder_mode))
        entry_path = f"{entry_path}/{name_part}"
    try:
        file_status = os.lstat(entry_path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(file_status.st_mode):
        raise files.NotRegular(entry_path, files.describe_file_kind(file_status.st_mode))
    return file_status


def put_in_place(staged_path: Path, final_path: Path, manifest_file: ManifestFile) -> None:
    """Move a file that arrived to its final path, and set the time that the manifest gives for it. Raises OSError."""
    os.utime(staged_path, ns=(manifest_file.mtime_ns, manifest_file.mtime_ns))
    files.move_into_place(staged_path, final_path)


def only_appended(path: Path, earlier_file: ManifestFile) -> bool:
    """Whether a file is an event file that still begins with its earlier content, so that events were only appended."""
    if not (path.name.startswith("events.") and path.suffix == ".jsonl"):
        return False
    return compute_digest(path, earlier_file.bytes) == earlier_file.sha256


def _list_folder(folder: Path, prefix: str, listing: FolderListing) -> None:
    try:
        with os.scandir(folder) as folder_entries:
            sorted_entries = sorted(folder_entries, key=lambda entry: entry.name)
    except FileNotFoundError:  # the run is still going on and removed the folder
        return
    for entry in sorted_entries:
        entry_name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or entry_name in (MANIFEST_FILE, WORK_FOLDER):
            continue
        try:
            entry_status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not files.is_utf8(entry.name):
            listing.other_kinds[entry_name] = f"{files.describe_file_kind(entry_status.st_mode)} whose name is not valid UTF-8"
        elif stat.S_ISREG(entry_status.st_mode):
            listing.status_by_file[entry_name] = entry_status
        elif stat.S_ISDIR(entry_status.st_mode):
            _list_folder(folder / entry.name, f"{entry_name}/", listing)
        else:
            listing.other_kinds[entry_name] = files.describe_file_kind(entry_status.st_mode)
