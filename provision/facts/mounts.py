"""The mount at a folder, its line in /etc/fstab, and whether it answers. An NFS server that hangs does not make us hang."""

from __future__ import annotations

import msgspec

from provision.facts import Fact

ANSWERS_S = 10
# findmnt without a path reads the kernel's list alone; `stat` is the one that asks the file system, and hangs with it.
PROGRAM = f"""\
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
    """source, kind: of the file system that is mounted, as the kernel names them."""

    source: str
    kind: str
    options: tuple[str, ...]


class Place(msgspec.Struct, frozen=True):
    """mount: the last one at this place, None without any. fstab: what /etc/fstab wants there. there: the folder exists.

    hangs: it does not answer, or its file handle is stale. empty: the folder, as it is seen now, has nothing in it.
    """

    mount: Mount | None = None
    fstab: Mount | None = None
    there: bool = True
    hangs: bool = False
    empty: bool = True


def place(path: str) -> Fact[Place]:
    """The question for one folder."""
    command = ["sh", "-c", PROGRAM, "place", path]
    return Fact(f"place {path}", lambda python: command, parse, timeout_s=3 * ANSWERS_S, root=True)


def parse(stdout: str) -> Place:
    """Raises ValueError."""
    mounts: dict[str, Mount] = {}
    words = set()
    for line in stdout.splitlines():
        what, _, rest = line.partition(" ")
        if what in ("mount", "fstab"):
            source, kind, options = rest.split()
            mounts[what] = Mount(source, kind, tuple(options.split(",")))
        else:
            words.add(what)
    if not words & {"answers", "hangs", "absent"}:
        raise ValueError("it does not say whether the folder answers.")
    return Place(mounts.get("mount"), mounts.get("fstab"), "absent" not in words, "hangs" in words, "empty" in words)


def parse_sources(stdout: str) -> dict[str, str]:
    """Where to what."""
    return {target: source for source, target in (line.split(" ", 1) for line in stdout.splitlines())}


NFS_MOUNTS = Fact(
    "NFS mounts",
    lambda python: ["sh", "-c", "findmnt --raw --noheadings --types nfs,nfs4 --output SOURCE,TARGET || true"],  # 1: none
    parse_sources,
    timeout_s=30,
)
