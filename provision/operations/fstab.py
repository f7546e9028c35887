"""A line of /etc/fstab, and the mount that it asks for; other lines are never touched."""

from __future__ import annotations

import shlex

from provision.facts import Unanswered
from provision.facts.mounts import Place, place
from provision.operations import Change, Run, Site, Target, shell

# The new file is the old one and a line, and takes its place in one rename.
ADD = """\
new=$(mktemp /etc/fstab.XXXXXX)
trap 'rm -f -- "$new"' EXIT
sed -e '$a\\' /etc/fstab > "$new"
printf '%s\\n' "$line" >> "$new"
chmod 644 "$new"
sync -- "$new"
mv -fT -- "$new" /etc/fstab
if test -d /run/systemd/system; then systemctl daemon-reload; fi"""
BARE = "it is not, and nothing is written to the bare folder: run the operations disks, nfs-server and nfs first"


def add(says: str, line: str) -> Change:
    """line: within double quotes of the shell, so that it may hold what is known there alone."""
    return shell(says, f'line="{line}"\n{ADD}')


def mount(folder: str) -> list[Change]:
    """As fstab says."""
    return [
        Run(f"make the folder {folder}", ["mkdir", "-p", "--", folder]),
        Run(f"mount {folder}", ["mount", "--", folder], 120),
    ]


def look(target: Target, folder: str) -> Place:
    """What is there. Raises Unanswered where it hangs, or where a mount would hide files."""
    found = target.facts[place(folder)]
    where = target.node.name
    if found.hangs:
        source = f" ({found.mount.source})" if found.mount else ""
        raise Unanswered(
            f"{where}: {folder}{source} does not answer: does its server run? Then on {where}: umount -f -l "
            f"{shlex.quote(folder)}, and run the same command again"
        )
    if found.mount is None and found.there and not found.empty:
        raise Unanswered(f"{where}: {folder} is not mounted, and has files in it that a mount would hide: move them away")
    return found


def is_below(folder: str, other: str) -> bool:
    """Whether a folder is another one, or lies in it."""
    return f"{folder}/".startswith(f"{other}/")


def guard(site: Site, target: Target) -> list[Change]:
    """What stands before a change that writes to storage.shared: nothing is written to a mount point without its mount."""
    storage = site.cluster.storage
    if site.cluster.provider != "ssh" or storage.shared is None:
        return []
    needed = [storage.mount] if storage.mount is not None and is_below(storage.shared, storage.mount) else []
    if storage.server not in (None, target.node.name):
        needed.append(storage.shared)
    return [
        shell(f"see that {folder} is mounted", f"mountpoint -q -- {folder} || {{ echo '{BARE}' >&2; exit 1; }}")
        for folder in needed
    ]
