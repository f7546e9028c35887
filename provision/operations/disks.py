"""An extra disk of each node: makes a file system on an empty disk and mounts it at boot; never changes a disk with data."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.disk import FILE_SYSTEM_LABEL, Disk, make_disk_query
from provision.operation import Change, Nothing, Operation, Site, Target, shell_change
from provision.operations import fstab

MAKE_S = 900.0  # time limit of mkfs, which takes minutes on a spinning disk of several terabytes
# The command that makes the file system checks once more that the disk is empty, because the disk may have been used after the
# plan was made.
CHECK_EMPTY = """\
test "$(lsblk --noheadings --list --output PATH,MOUNTPOINTS -- {disk} | wc -w)" = 1
signs=$(wipefs --no-act --noheadings -- {disk})
test -z "$signs"
cmp -s -n 1048576 -- {disk} /dev/zero"""
# mkfs runs in a session of its own, so that Ctrl-C or a time limit does not end mkfs: the next command would refuse a
# half-formatted disk as not empty.
MAKE_FILE_SYSTEM = "setsid --wait mkfs.ext4 -q -L {label} -- {disk}"


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make a file system on storage.disk and mount it at storage.mount. Raises Unanswered if the disk cannot be used."""
    storage = site.cluster.storage
    if storage.disk is None or storage.mount is None:
        return Nothing("cluster.yaml names no storage.disk")
    mount_place = fstab.inspect_mount(target, storage.mount)
    name = target.node.name
    if mount_place.fstab is not None and mount_place.mount is not None:
        return Nothing(f"{mount_place.mount.source} is mounted at {storage.mount}")
    if mount_place.fstab is not None:  # this line has the UUID of the disk, whose name in storage.disk may change at a boot
        if not mount_place.fstab.source.startswith("UUID="):
            raise Unanswered(
                f"{name}: /etc/fstab already lists {mount_place.fstab.source} for {storage.mount}: mount it, or choose another "
                "storage.mount"
            )
        return fstab.make_mount_changes(storage.mount)
    disk_state = target.facts[make_disk_query(storage.disk)]
    if mount_place.mount is not None:
        if mount_place.mount.source != disk_state.path:
            raise Unanswered(
                f"{name}: {mount_place.mount.source} is mounted at {storage.mount}, but storage.disk is {storage.disk}: choose "
                "another storage.mount, or, if the mounted disk is the one you want, remove storage.disk and storage.mount"
            )
        return [_make_fstab_change(storage.disk, storage.mount)]
    fstab_change = _make_fstab_change(storage.disk, storage.mount)
    return [*_plan_disk_format(name, storage.disk, disk_state), fstab_change, *fstab.make_mount_changes(storage.mount)]


def _plan_disk_format(name: str, path: str, disk_state: Disk) -> list[Change]:
    """The change that makes a file system on an empty disk; none if `provision` has already made the file system.

    name: the name of the node. Raises Unanswered if the disk does not exist or is not empty.
    """
    if disk_state.path is None:
        raise Unanswered(f"{name}: there is no disk {path}: lsblk on this node lists its disks; correct storage.disk")
    if disk_state.ours:
        return []
    if disk_state.holds:
        raise Unanswered(
            f"{name}: {path} is not empty and was not changed: {', '.join(disk_state.holds)}. Set storage.disk to an empty "
            "disk, or, if its data is no longer needed, erase it yourself on this node"
        )
    make_script = f"{CHECK_EMPTY.format(disk=path)}\n{MAKE_FILE_SYSTEM.format(label=FILE_SYSTEM_LABEL, disk=path)}"
    return [shell_change(f"make an ext4 file system on {path}, which is empty", make_script, timeout_s=MAKE_S)]


def _make_fstab_change(disk_path: str, mountpoint: str) -> Change:
    """The change that adds the disk to /etc/fstab. Without the option nofail, a node with a broken disk would not boot."""
    uuid_option = f"UUID=$(blkid --probe --match-tag UUID --output value -- {disk_path})"
    return fstab.plan_line(
        f"mount {disk_path} at {mountpoint} at every boot (/etc/fstab)", f"{uuid_option} {mountpoint} ext4 defaults,nofail 0 2"
    )


DISKS = Operation("disks", plan)
