"""Adds a line to /etc/fstab and mounts its file system; other lines are never changed."""

from __future__ import annotations

import shlex

from provision.fact import Unanswered
from provision.facts.mounts import MountPlace, make_mount_query
from provision.operation import Change, RunCommand, Site, Target, shell_change
from shardlab.cluster.cloudlab_keys import EXTRA_DISK

# Writes a copy of /etc/fstab with one more line, and replaces /etc/fstab by this copy with one rename.
ADD_LINE = """\
new=$(mktemp /etc/fstab.XXXXXX)
trap 'rm -f -- "$new"' EXIT
sed -e '$a\\' /etc/fstab > "$new"
printf '%s\\n' "$line" >> "$new"
chmod 644 "$new"
sync -- "$new"
mv -fT -- "$new" /etc/fstab
if test -d /run/systemd/system; then systemctl daemon-reload; fi"""
NOT_MOUNTED = "it is not mounted, so nothing is written there: first run the operations disks, extra-disks, nfs-server and nfs"


def plan_line(description: str, fstab_line: str) -> Change:
    """The change that adds a line to /etc/fstab. The line may contain $(COMMAND), which the shell of the node executes."""
    return shell_change(description, f'line="{fstab_line}"\n{ADD_LINE}')


def make_mount_changes(folder: str) -> list[Change]:
    """The changes that mount a folder as /etc/fstab says."""
    return [
        RunCommand(f"make the folder {folder}", ["mkdir", "-p", "--", folder]),
        RunCommand(f"mount {folder}", ["mount", "--", folder], 120),
    ]


def inspect_mount(target: Target, folder: str) -> MountPlace:
    """The state of a folder to be mounted. Raises Unanswered if the folder hangs, or if a mount would hide its files."""
    mount_place = target.facts[make_mount_query(folder)]
    node_name = target.node.name
    if mount_place.hangs:
        source = f" ({mount_place.mount.source})" if mount_place.mount else ""
        raise Unanswered(
            f"{node_name}: {folder}{source} does not answer. Make sure that its server runs; then, on {node_name}, run umount "
            f"-f -l {shlex.quote(folder)}, and run the same command again"
        )
    if mount_place.mount is None and mount_place.there and not mount_place.empty:
        raise Unanswered(f"{node_name}: {folder} is not mounted, and contains files that a mount would hide: move these files")
    return mount_place


def is_below(folder: str, parent_folder: str) -> bool:
    """Whether `folder` is the folder `parent_folder` or inside it."""
    return f"{folder}/".startswith(f"{parent_folder}/")


def list_required_mounts(site: Site, target: Target, folder: str) -> list[str]:
    """The folders at which this node has to mount disks, because `folder` must not be on the root file system."""
    storage_keys = site.cluster.storage
    mountpoints = [storage_keys.mount] if storage_keys.mount is not None else []
    if site.cluster.provider == "cloudlab" and storage_keys.mount != EXTRA_DISK:
        is_client = storage_keys.shared is not None and storage_keys.server not in (None, target.node.name)
        # On a client, a folder in the shared folder is on the disk of the server.
        if not (is_client and storage_keys.shared is not None and is_below(folder, storage_keys.shared)):
            mountpoints.append(EXTRA_DISK)
    return [mountpoint for mountpoint in mountpoints if is_below(folder, mountpoint)]


def make_mount_checks(site: Site, target: Target, folder: str | None = None) -> list[Change]:
    """Changes that check that the file system of a folder is mounted. They come before a change that writes to the folder.

    folder: None means storage.shared.
    """
    storage_keys = site.cluster.storage
    folder = folder or storage_keys.shared
    if site.is_practice or folder is None:
        return []
    mountpoints = list_required_mounts(site, target, folder)
    if storage_keys.shared is not None and storage_keys.server not in (None, target.node.name):
        mountpoints.append(storage_keys.shared)
    return [
        shell_change(
            f"check that {folder} is mounted",
            f"mountpoint -q -- {folder} || {{ echo '{NOT_MOUNTED}' >&2; exit 1; }}",
            root=target.node.may_sudo,
        )
        for folder in mountpoints
    ]
