"""Folders of a user that several machines may share, with their free space: those that variables such as SCRATCH name."""

from __future__ import annotations

import re

import msgspec

from provision.fact import Fact

# Lines: NAME, folder, file system, free bytes, free inodes; `-` stands for what df does not say in time.
PROGRAM = r"""
env | sed -n 's|^\([A-Z][A-Z0-9_]*\)=\(/[A-Za-z0-9._/-]*\)$|\1 \2|p' | sort -u | while read -r name folder; do
    case $name in PWD|OLDPWD|TMPDIR|LMOD_*|MODULE*|XDG_*|SLURM_*|SSH_*|*PATH|*_DIR|*_ROOT|*_PKG|PIP_*) continue ;; esac
    test -d "$folder" && test -w "$folder" || continue
    kind=$(timeout 10 df -PT -B1 -- "$folder" 2>/dev/null | awk 'NR==2 {print $2, $5}')
    inodes=$(timeout 10 df -Pi -- "$folder" 2>/dev/null | awk 'NR==2 {print $4}')
    printf '%s %s %s %s\n' "$name" "$folder" "${kind:-- -}" "${inodes:--}"
done
"""
NETWORK = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "beegfs_nodev",
    "ceph",
    "panfs",
    "wekafs",
    "fuse.glusterfs",
    "orangefs",
    "afs",
}
_VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]{0,60}$")
_FOLDER = re.compile(r"^/[A-Za-z0-9._/-]+$")


class SharedFolder(msgspec.Struct, frozen=True):
    """A folder that a variable of the login shell names."""

    variable: str
    path: str
    file_system: str
    free_bytes: int | None
    free_inodes: int | None

    @property
    def is_network(self) -> bool:
        """Whether its file system is one that machines share."""
        return self.file_system in NETWORK


def command(python: str) -> list[str]:
    return ["bash", "-lc", PROGRAM]


def parse(stdout: str) -> tuple[SharedFolder, ...]:
    """One entry per folder. Lines that cannot be read are left out."""
    folders: dict[str, SharedFolder] = {}
    for line in stdout.splitlines():
        words = line.split()
        if len(words) == 5 and _VARIABLE.match(words[0]) and _FOLDER.match(words[1]):  # a profile may print lines, too
            variable, path, kind, free, inodes = words
            folders.setdefault(path, SharedFolder(variable, path, kind, _count(free), _count(inodes)))
    return tuple(folders.values())


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


SHARED_FOLDERS = Fact("folders", command, parse, timeout_s=60)
