"""Protects the folder that practice nodes share with this machine: files of a node's root there give nobody rights here.

Nodes have no user namespace: root there is root here. On this machine the folder is therefore mounted over itself with
`nosuid,nodev`, which the nodes' own mounts take over.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from provision.practice.base import UID, run
from shardlab.host import boot_id

OPTIONS = frozenset({"nosuid", "nodev"})
NOTE = "shared"  # in the folder of a cluster's nodes: the boot in which we mounted, and what


def is_protected(folder: Path) -> bool:
    """Whether setuid programs and devices in the folder have no effect on this machine; true if the folder does not exist."""
    return not folder.exists() or _options(folder) >= OPTIONS


def protect(state: Path, folder: Path) -> None:
    """Make the folder if it is missing, owned by the nodes' user, and mount it over itself. Raises NoBase."""
    if not folder.exists():
        folder.mkdir(parents=True)
        os.chown(folder, UID, UID)
    if not is_protected(folder):
        # noted first: if we are killed in between, the note of a mount that does not exist is harmless
        (state / NOTE).write_text(f"{boot_id()} {folder}\n", encoding="utf-8")
        run(["mount", "--bind", "-o", "nosuid,nodev", str(folder), str(folder)])
    elif not (state / NOTE).exists() and (other := _noted_by_another(state, folder)) is not None:
        (state / NOTE).write_bytes((other / NOTE).read_bytes())


def release(state: Path) -> None:
    """Undo `protect` once the last cluster that shares the folder is gone.

    Before that, setuid bits and devices are removed from the folder, since they would have effect from then on. Raises NoBase.
    """
    note = state / NOTE
    if not note.exists():
        return
    boot, _, path = note.read_text(encoding="utf-8").rstrip("\n").partition(" ")
    folder = Path(path)
    if boot == boot_id() and _noted_by_another(state, folder) is None and _options(folder) >= OPTIONS:
        disarm(folder)
        run(["umount", "--lazy", str(folder)])  # a shell may stand in it
    note.unlink()


def disarm(folder: Path) -> None:
    """Remove setuid and setgid bits of files, and devices, below a folder; other file systems below it are left alone."""
    device = folder.lstat().st_dev
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if (Path(place) / name).lstat().st_dev == device]
        for name in names:
            path = Path(place) / name
            found = path.lstat()
            if stat.S_ISBLK(found.st_mode) or stat.S_ISCHR(found.st_mode):
                path.unlink()
            elif stat.S_ISREG(found.st_mode) and found.st_mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(found.st_mode) & 0o777)


def _options(folder: Path) -> set[str]:
    """The options of the mount on which the folder is."""
    return set(run(["findmnt", "--noheadings", "--output", "OPTIONS", "--target", str(folder)]).strip().split(","))


def _noted_by_another(state: Path, folder: Path) -> Path | None:
    """The folder of another cluster whose nodes share the same folder, in this boot."""
    wanted = f"{boot_id()} {folder}\n"
    for other in sorted(state.parent.iterdir()):
        if other != state and (other / NOTE).is_file() and (other / NOTE).read_text(encoding="utf-8") == wanted:
            return other
    return None
