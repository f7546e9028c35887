"""Protects the folder that practice nodes share with this machine: files that root of a node writes into the folder, such as
setuid programs, must not give users of this machine more rights.

Nodes have no user namespace, so that root on a node is also root on this machine. Therefore the folder is mounted over itself
on this machine with the options `nosuid,nodev`, which the mounts of the folder on the nodes inherit.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from provision.practice.base import PRACTICE_UID, run_here
from shardlab.hardware.host import read_boot_id

PROTECTING_OPTIONS = frozenset({"nosuid", "nodev"})
# The name of a note in the folder of a cluster's nodes: the boot id at the mount, and the mounted folder
SHARED_NOTE = "shared"


def is_protected(folder: Path) -> bool:
    """Whether setuid programs and devices in the folder have no effect on this machine; true if the folder does not exist."""
    return not folder.exists() or _read_mount_options(folder) >= PROTECTING_OPTIONS


def protect_folder(state_folder: Path, folder: Path) -> None:
    """Make the shared folder if it is missing, owned by the nodes' user. Mount it over itself with the options `nosuid` and
    `nodev`, unless it has them already. Raises PracticeNodeError.

    state_folder: the folder of the cluster's nodes. The file SHARED_NOTE in it names the mount, so that `release_folder` can
    undo it. folder: the shared folder."""
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, PRACTICE_UID, PRACTICE_UID)
    if not is_protected(folder):
        # the note is written before the mount: if the process is killed in between, a note without a mount is harmless
        (state_folder / SHARED_NOTE).write_text(f"{read_boot_id()} {folder}\n", encoding="utf-8")
        run_here(["mount", "--bind", "-o", "nosuid,nodev", str(folder), str(folder)])
    elif not (state_folder / SHARED_NOTE).exists() and (other_state := _find_other_cluster(state_folder, folder)) is not None:
        (state_folder / SHARED_NOTE).write_bytes((other_state / SHARED_NOTE).read_bytes())


def release_folder(state_folder: Path) -> None:
    """Unmount the shared folder that `protect_folder` mounted, if no other cluster uses the folder. Raises PracticeNodeError.

    Setuid bits and devices in the folder are removed first, because they would have an effect without the mount.
    state_folder: the folder of the cluster's nodes, which contains the note.
    """
    note_path = state_folder / SHARED_NOTE
    if not note_path.exists():
        return
    noted_boot_id, _, folder_text = note_path.read_text(encoding="utf-8").rstrip("\n").partition(" ")
    folder = Path(folder_text)
    if (
        noted_boot_id == read_boot_id()
        and _find_other_cluster(state_folder, folder) is None
        and _read_mount_options(folder) >= PROTECTING_OPTIONS
    ):
        disarm_folder(folder)
        run_here(["umount", "--lazy", str(folder)])  # lazy, because the folder may be the current folder of a shell
    note_path.unlink()


def disarm_folder(folder: Path) -> None:
    """Remove the setuid and setgid bits of files, and all devices, below a folder. Other file systems below it are skipped."""
    device_id = folder.lstat().st_dev
    for parent_path, subfolders, file_names in os.walk(folder):
        subfolders[:] = [subfolder for subfolder in subfolders if (Path(parent_path) / subfolder).lstat().st_dev == device_id]
        for subfolder in file_names:
            path = Path(parent_path) / subfolder
            path_status = path.lstat()
            if stat.S_ISBLK(path_status.st_mode) or stat.S_ISCHR(path_status.st_mode):
                path.unlink()
            elif stat.S_ISREG(path_status.st_mode) and path_status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(path_status.st_mode) & 0o777)


def _read_mount_options(folder: Path) -> set[str]:
    """The mount options of the file system that contains a folder."""
    return set(run_here(["findmnt", "--noheadings", "--output", "OPTIONS", "--target", str(folder)]).strip().split(","))


def _find_other_cluster(state_folder: Path, folder: Path) -> Path | None:
    """The state folder of another cluster that, by its note, mounted the same shared folder since this boot; None if none did.

    state_folder: the state folder of this cluster. folder: the shared folder.
    """
    note_text = f"{read_boot_id()} {folder}\n"
    for other_state in sorted(state_folder.parent.iterdir()):
        if (
            other_state != state_folder
            and (other_state / SHARED_NOTE).is_file()
            and (other_state / SHARED_NOTE).read_text(encoding="utf-8") == note_text
        ):
            return other_state
    return None
