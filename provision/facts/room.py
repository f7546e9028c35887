"""The free space of the file system that contains a folder, or that will contain the folder when it is created."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

PRINT_FREE_SPACE = """\
place=$1
while ! test -e "$place"; do place=$(dirname -- "$place"); done
df --output=avail,iavail,target -B1 -- "$place" | tail -n 1
"""


class FreeSpace(msgspec.Struct, frozen=True):
    """The free space of a file system."""

    free_bytes: int
    free_inodes: int
    """0: the file system does not count inodes."""
    mount: str
    """The folder at which the file system is mounted."""


def make_free_space_query(path: str, *, root: bool = True) -> FactQuery[FreeSpace]:
    """The fact about one folder. root: whether the command runs as root, who may look into every folder."""
    return FactQuery(
        f"room {path}", lambda python: ["sh", "-c", PRINT_FREE_SPACE, "room", path], parse, timeout_s=30, root=root
    )


def parse(stdout: str) -> FreeSpace:
    """The free space in the output of PRINT_FREE_SPACE. Raises ValueError."""
    free_kib, free_inodes, mount = stdout.strip().split(maxsplit=2)
    return FreeSpace(int(free_kib), 0 if free_inodes == "-" else int(free_inodes), mount)
