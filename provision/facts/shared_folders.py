"""Folders of the user that several machines may share, with their free space: folders that variables such as SCRATCH name,
and folders with the name of the user in network file systems."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery
from shardlab.remote.login_shell import make_login_argv

NETWORK_FILE_SYSTEMS = {
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
NETWORK_PATTERN = "|".join(sorted(NETWORK_FILE_SYSTEMS)).replace(".", "[.]")
MOST_MOUNTS = 32  # the most network file systems that are searched for a folder of the user
# Each line of output has the variable, the folder, its file system, free bytes and free inodes; `-` means that no variable
# names the folder, or that df did not print the number in time. Commands are ended by SIGKILL, because only this signal ends
# a command that waits for a file server that does not answer.
LIST_SHARED_FOLDERS = rf"""
user=$(id -un)
{{
    env | sed -n 's|^\([A-Z][A-Z0-9_]*\)=\(/[A-Za-z0-9._/-]*\)$|\1 \2|p' | sort -u
    awk '$3 ~ /^({NETWORK_PATTERN})$/ {{print $2}}' "${{1:-/proc/mounts}}" | sort -u | head -n {MOST_MOUNTS} |
        while read -r mount; do printf -- '- %s/%s\n' "$mount" "$user"; done
}} | while read -r name folder; do
    case $name in PWD|OLDPWD|TMPDIR|LMOD_*|MODULE*|XDG_*|SLURM_*|SSH_*|*PATH|*_DIR|*_ROOT|*_PKG|PIP_*) continue ;; esac
    timeout -s KILL 5 sh -c 'test -d "$1" && test -w "$1"' test "$folder" 2>/dev/null || continue
    kind=$(timeout -s KILL 10 df -B1 --output=fstype,avail -- "$folder" 2>/dev/null | awk 'NR==2 {{print $1, $2}}')
    inodes=$(timeout -s KILL 10 df --output=iavail -- "$folder" 2>/dev/null | awk 'NR==2 {{print $1}}')
    printf '%s %s %s %s\n' "$name" "$folder" "${{kind:-- -}}" "${{inodes:--}}"
done
"""
_VARIABLE_NAME = re.compile(r"^[A-Z][A-Z0-9_]{0,60}\Z")
_FOLDER_PATH = re.compile(r"^/[A-Za-z0-9._/-]+\Z")


class SharedFolder(msgspec.Struct, frozen=True):
    """A folder that the user may write."""

    variable: str
    """The variable of the login shell that names the folder; empty if none does."""
    path: str
    file_system: str
    free_bytes: int | None
    free_inodes: int | None

    @property
    def is_network(self) -> bool:
        """Whether the folder is in a network file system, which several machines can share."""
        return self.file_system in NETWORK_FILE_SYSTEMS


def build_command(python: str) -> list[str]:
    return make_login_argv(LIST_SHARED_FOLDERS)


def parse(stdout: str) -> tuple[SharedFolder, ...]:
    """The folders in the output of LIST_SHARED_FOLDERS, each once. Lines that cannot be read are skipped."""
    folders: dict[str, SharedFolder] = {}
    for line in stdout.splitlines():
        words = line.split()
        # Other lines may come from the user's shell profile.
        if len(words) == 5 and (words[0] == "-" or _VARIABLE_NAME.match(words[0])) and _FOLDER_PATH.match(words[1]):
            variable, path, fs_type, free_text, inode_text = words
            variable = "" if variable == "-" else variable
            folders.setdefault(path, SharedFolder(variable, path, fs_type, _parse_count(free_text), _parse_count(inode_text)))
    return tuple(folders.values())


def _parse_count(number_text: str) -> int | None:
    return int(number_text) if number_text.isascii() and number_text.isdigit() and len(number_text) < 20 else None


SHARED_FOLDERS = FactQuery("folders", build_command, parse, timeout_s=60)
