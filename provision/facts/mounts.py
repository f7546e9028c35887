"""The mount at a folder, its line in /etc/fstab, and whether the folder answers. An NFS server that hangs is reported."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

ANSWERS_S = 10
# findmnt without a path reads only the kernel's list of mounts. `stat` asks the file system and hangs if the file system hangs,
# so it runs with a time limit.
DESCRIBE_MOUNT = f"""\
place=$1
findmnt --raw --noheadings --output TARGET,SOURCE,FSTYPE,OPTIONS |
    while read -r target rest; do test "$target" = "$place" && printf 'mount %s\\n' "$rest"; done
while read -r spec target kind options rest; do
    case "$spec" in '#'*) continue ;; esac
    test "$target" = "$place" && printf 'fstab %s %s %s\\n' "$spec" "$kind" "$options"
done < /etc/fstab
timeout -k 1 {ANSWERS_S} stat -- "$place" >/dev/null 2>&1
case $? in
    0) echo answers ;;
    124|137) echo hangs; exit 0 ;;
    *) if timeout -k 1 {ANSWERS_S} stat -- "$place" 2>&1 | grep -qi stale; then echo hangs; else echo absent; fi; exit 0 ;;
esac
test -z "$(ls -A -- "$place" | head -n 1)" && echo empty
exit 0
"""


class Mount(msgspec.Struct, frozen=True):
    """A mounted file system, or a line of /etc/fstab."""

    source: str
    """The device or SERVER:FOLDER, as the kernel or /etc/fstab writes it."""
    kind: str
    """The type of the file system."""
    options: tuple[str, ...]


class MountPlace(msgspec.Struct, frozen=True):
    """A folder on which a file system is, or may be, mounted."""

    mount: Mount | None = None
    """The last mount at this folder; None: nothing is mounted."""
    fstab: Mount | None = None
    """The line of /etc/fstab for this folder."""
    there: bool = True
    """Whether the folder exists."""
    hangs: bool = False
    """Whether the folder does not answer, or its file handle is stale."""
    empty: bool = True
    """Whether the folder, as it is seen now, contains nothing."""


def make_mount_query(path: str) -> FactQuery[MountPlace]:
    """The fact about the folder `path` as a place for a mount."""
    mount_command = ["sh", "-c", DESCRIBE_MOUNT, "place", path]
    return FactQuery(f"place {path}", lambda python: mount_command, parse, timeout_s=3 * ANSWERS_S, root=True)


def parse(stdout: str) -> MountPlace:
    """The folder and its mount, parsed from the output of DESCRIBE_MOUNT. Raises ValueError."""
    mount_by_tag: dict[str, Mount] = {}
    line_tags = set()
    for line in stdout.splitlines():
        line_tag, _, tag_value = line.partition(" ")
        if line_tag in ("mount", "fstab"):
            source, file_system, options = tag_value.split()
            mount_by_tag[line_tag] = Mount(source, file_system, tuple(options.split(",")))
        else:
            line_tags.add(line_tag)
    if not line_tags & {"answers", "hangs", "absent"}:
        raise ValueError("it does not say whether the folder answers.")
    return MountPlace(
        mount_by_tag.get("mount"),
        mount_by_tag.get("fstab"),
        "absent" not in line_tags,
        "hangs" in line_tags,
        "empty" in line_tags,
    )


def parse_sources(stdout: str) -> dict[str, str]:
    """The source of each NFS mount, such as SERVER:FOLDER, by the folder at which it is mounted."""
    return {mount_folder: source for source, mount_folder in (line.split(" ", 1) for line in stdout.splitlines())}


NFS_MOUNTS = FactQuery(
    "NFS mounts",
    # Without NFS mounts, findmnt exits with 1, which is ignored.
    lambda python: ["sh", "-c", "findmnt --raw --noheadings --types nfs,nfs4 --output SOURCE,TARGET || true"],
    parse_sources,
    timeout_s=30,
)
