"""Transfers files from the workspace on the cluster into a staging folder, with rsync.

Files that arrive are not trusted. The caller checks each file before it moves the file into a run folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from collect.fetching import manifest, side_by_side
from collect.fetching.manifest import ManifestFile
from shardlab.files import files
from shardlab.files.files import NotRegular
from shardlab.remote import remote_workspace, rsync
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.remote.rsync import RsyncEnd

RSYNC_OPTIONS = (
    *rsync.FROM_OTHERS,
    # Level 1 compresses records, which are text, well enough. For files that are already compressed, such as traces, the
    # default level needs twice the CPU time.
    "--compress", "--compress-level=1",
    "--times", "--omit-dir-times",  # files get their times during the transfer, so most need no change after they have arrived
    "--timeout=120",
)  # fmt: skip
LARGE_FILE_BYTES = 1 << 20  # files with more bytes than this are hashed in several threads at the same time


class Rsync:
    """Transfers files of runs from the workspace on the cluster with rsync."""

    def __init__(self, cluster: RemoteWorkspace, lock: int, must_stop: Callable[[], bool]) -> None:
        """Prepare transfers from a workspace. Raises ShardlabError if rsync is not installed.

        lock: the file descriptor of a lock, which rsync also holds until it ends. must_stop: returns whether to stop a transfer
        early.
        """
        rsync.rsync_must_be_installed("collect fetch")
        self._lock, self._must_stop = lock, must_stop
        self._source, self._login = f"{cluster.workspace}/runs/", list[str]()
        if not sees_workspace(cluster):
            self._source, self._login = rsync.remote_words(cluster.address, self._source)

    def copy_files(
        self, target_folder: Path, file_names: Sequence[str], *options: str, report_bytes: Callable[[int], None] | None = None
    ) -> RsyncEnd:
        """Transfer files into the folder `target_folder`.

        file_names: paths relative to the folder of all runs. options: further options of rsync. report_bytes: is called from
        time to time with the number of bytes that have arrived."""
        if not file_names:
            return RsyncEnd(0)
        # The staging folder is only accessible for this user. Below it, entries have the modes of new entries of this user.
        mode_option = f"--chmod=D{rsync.apply_umask(0o755):o},F{rsync.apply_umask(0o644):o}"
        return rsync.run_rsync(
            [*RSYNC_OPTIONS, mode_option, *self._login, *options],
            file_names,
            self._source,
            f"{target_folder}/",
            must_stop=self._must_stop,
            lock_descriptors=(self._lock,),
            on_progress=report_bytes,
        )


def find_arrived_files(folder: Path, expected_files: Mapping[str, ManifestFile]) -> set[str]:
    """Find the files in a staging folder whose content is complete, that is, equal to the content in a manifest. Returns their
    names.

    expected_files: {path relative to the folder: size and digest in the manifest}. If a file grew during the transfer, it is
    cut to the size in the manifest. Raises WorkspaceError if a file cannot be read.
    """
    if not files.is_folder(folder):
        return set()
    with files.as_workspace_error("read"):
        status_by_name = manifest.list_files(folder).regular

        def has_arrived(name: str) -> bool:
            return _has_content(f"{folder}/{name}", status_by_name[name].st_size, expected_files[name])

        present_names = [name for name in expected_files if name in status_by_name]
        large_names = [name for name in present_names if expected_files[name].bytes > LARGE_FILE_BYTES]
        are_same = side_by_side.map_in_threads(has_arrived, large_names)
        arrived_names = {name for name in present_names if expected_files[name].bytes <= LARGE_FILE_BYTES and has_arrived(name)}
        return arrived_names.union(
            name for name, has_arrived_here in zip(large_names, are_same, strict=True) if has_arrived_here
        )


def _has_content(path: str, file_bytes: int, file: ManifestFile) -> bool:
    if file_bytes < file.bytes:
        return False
    try:
        if manifest.compute_digest(path, file.bytes) != file.sha256:
            return False
    except (FileNotFoundError, NotRegular):
        return False
    if file_bytes > file.bytes:
        os.truncate(path, file.bytes)
    return True


def put_in_place(staged_path: Path, final_path: Path, file: ManifestFile) -> None:
    """Move a file that arrived to its final path, and set the time that the manifest gives for it. Raises OSError."""
    os.utime(staged_path, ns=(file.mtime_ns, file.mtime_ns))
    rsync.move_into_place(staged_path, final_path)


def finish_folder(folder: Path, expected_files: Mapping[str, ManifestFile], other_names: Iterable[str]) -> bool:
    """Prepare a folder of files that arrived so that the folder as a whole can become a run folder. Raises OSError.

    Every file gets the time that the manifest gives for it, and every entry the mode that a new entry of this user has.

    expected_files: all files that the folder must have. other_names: names of other files that the folder may have.

    Returns False, and leaves the folder unchanged, if an expected file is missing, or if the folder has a file that is
    neither in `expected_files` nor in `other_names`.
    """
    if not files.is_folder(folder):
        return False
    mode_of_type = {stat.S_IFDIR: rsync.apply_umask(0o755), stat.S_IFREG: rsync.apply_umask(0o644)}
    status_of_path: list[tuple[str, os.stat_result]] = [(str(folder), os.lstat(folder))]
    mtime_of_path: list[tuple[str, int]] = []
    present_names = set()
    for path, status in status_of_path:
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as folder_entries:
                status_of_path += [(entry.path, entry.stat(follow_symlinks=False)) for entry in folder_entries]
            continue
        name = path[len(str(folder)) + 1 :]
        if not stat.S_ISREG(status.st_mode) or (name not in expected_files and name not in other_names):
            return False
        present_names.add(name)
        if name in expected_files and status.st_mtime_ns != expected_files[name].mtime_ns:
            mtime_of_path.append((path, expected_files[name].mtime_ns))
    if any(name not in present_names for name in expected_files):
        return False
    for path, mtime_ns in mtime_of_path:
        os.utime(path, ns=(mtime_ns, mtime_ns))
    for path, status in status_of_path:
        if stat.S_IMODE(status.st_mode) != mode_of_type[stat.S_IFMT(status.st_mode)]:
            Path(path).chmod(mode_of_type[stat.S_IFMT(status.st_mode)])
    return True


def sees_workspace(cluster: RemoteWorkspace) -> bool:
    """Whether this machine sees the workspace of the cluster under the same path, e.g. on shared storage."""
    try:
        return files.read(Path(cluster.workspace) / remote_workspace.MARK_FILE).decode() == cluster.mark
    except (OSError, UnicodeDecodeError):
        return False
