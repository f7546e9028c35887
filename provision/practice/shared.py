"""Protects the folder that practice nodes share with this machine: files that root of a node writes into the folder, such as
setuid programs, must not give users of this machine more rights.

Nodes have no user namespace, so that root on a node is also root on this machine. Therefore the folder is mounted over itself
on this machine with the options `nosuid,nodev`, which the mounts of the folder on the nodes inherit.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from provision.practice.base import UID, run
from shardlab.hardware.host import boot_id

OPTIONS = frozenset({"nosuid", "nodev"})
NOTE = "shared"  # the name of a note in the folder of a cluster's nodes: the boot id at the mount, and the mounted folder


def is_protected(folder: Path) -> bool:
    """Whether setuid programs and devices in the folder have no effect on this machine; true if the folder does not exist."""
    return not folder.exists() or _read_mount_options(folder) >= OPTIONS


def protect_folder(state: Path, folder: Path) -> None:
    """Make the shared folder if it is missing, owned by the nodes' user. Mount it over itself with the options `nosuid` and
    `nodev`, unless it has them already. Raises PracticeNodeError.

    state: the folder of the cluster's nodes. The file NOTE in it names the mount, so that `release_folder` can undo the mount.
    folder: the shared folder.
    """
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, UID, UID)
    if not is_protected(folder):
        # the note is written before the mount: if the process is killed in between, a note without a mount is harmless
        (state / NOTE).write_text(f"{boot_id()} {folder}\n", encoding="utf-8")
        run(["mount", "--bind", "-o", "nosuid,nodev", str(folder), str(folder)])
    elif not (state / NOTE).exists() and (other := _find_other_user(state, folder)) is not None:
        (state / NOTE).write_bytes((other / NOTE).read_bytes())


def release_folder(state: Path) -> None:
    """Unmount the shared folder that `protect_folder` mounted, if no other cluster uses the folder. Raises PracticeNodeError.

    Setuid bits and devices in the folder are removed first, because they would have an effect without the mount.
    state: the folder of the cluster's nodes, which contains the note.
    """
    note = state / NOTE
    if not note.exists():
        return
    boot, _, path = note.read_text(encoding="utf-8").rstrip("\n").partition(" ")
    folder = Path(path)
    if boot == boot_id() and _find_other_user(state, folder) is None and _read_mount_options(folder) >= OPTIONS:
        disarm_folder(folder)
        run(["umount", "--lazy", str(folder)])  # lazy, because the folder may be the current folder of a shell
    note.unlink()


def disarm_folder(folder: Path) -> None:
    """Remove the setuid and setgid bits of files, and all devices, below a folder. Other file systems below it are skipped."""
    device = folder.lstat().st_dev
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if (Path(parent) / name).lstat().st_dev == device]
        for name in names:
            path = Path(parent) / name
            status = path.lstat()
            if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
                path.unlink()
            elif stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(status.st_mode) & 0o777)


def _read_mount_options(folder: Path) -> set[str]:
    """The mount options of the file system that contains a folder."""
    return set(run(["findmnt", "--noheadings", "--output", "OPTIONS", "--target", str(folder)]).strip().split(","))


def _find_other_user(state: Path, folder: Path) -> Path | None:
    """The state folder of another cluster that, by its note, mounted the same shared folder since this boot; None if none did.

    state: the state folder of this cluster. folder: the shared folder.
    """
    note_text = f"{boot_id()} {folder}\n"
    for other in sorted(state.parent.iterdir()):
        if other != state and (other / NOTE).is_file() and (other / NOTE).read_text(encoding="utf-8") == note_text:
            return other
    return None
