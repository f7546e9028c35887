"""An extra disk of each node: makes a file system on an empty disk and mounts it at boot; never changes a disk with data."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.disk import LABEL, Disk, disk
from provision.operation import Change, Nothing, Operation, Site, Target, shell
from provision.operations import fstab

MAKE_S = 900.0  # time limit of mkfs, which takes minutes on a spinning disk of several terabytes
# The command that makes the file system checks once more that the disk is empty, because the disk may have been used after the
# plan was made.
EMPTY = """\
test "$(lsblk --noheadings --list --output PATH,MOUNTPOINTS -- {disk} | wc -w)" = 1
signs=$(wipefs --no-act --noheadings -- {disk})
test -z "$signs"
cmp -s -n 1048576 -- {disk} /dev/zero"""
# mkfs runs in a session of its own, so that Ctrl-C or a time limit does not end mkfs: the next command would refuse a
# half-formatted disk as not empty.
FORMAT = "setsid --wait mkfs.ext4 -q -L {label} -- {disk}"


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make a file system on storage.disk and mount it at storage.mount. Raises Unanswered if the disk cannot be used."""
    storage = site.cluster.storage
    if storage.disk is None or storage.mount is None:
        return Nothing("cluster.yaml names no storage.disk")
    place = fstab.look(target, storage.mount)
    where = target.node.name
    if place.fstab is not None and place.mount is not None:
        return Nothing(f"{place.mount.source} is mounted at {storage.mount}")
    if place.fstab is not None:  # the disk is found by the UUID in this line: its name in storage.disk may change at a boot
        if not place.fstab.source.startswith("UUID="):
            raise Unanswered(
                f"{where}: /etc/fstab already lists {place.fstab.source} for {storage.mount}: mount it, or choose another "
                "storage.mount"
            )
        return fstab.mount(storage.mount)
    empty_disk = target.facts[disk(storage.disk)]
    if place.mount is not None:
        if place.mount.source != empty_disk.path:
            raise Unanswered(
                f"{where}: {place.mount.source} is mounted at {storage.mount}, but storage.disk is {storage.disk}: choose "
                "another storage.mount, or, if the mounted disk is the one you want, remove storage.disk and storage.mount"
            )
        return [_entry(storage.disk, storage.mount)]
    return [*_format(where, storage.disk, empty_disk), _entry(storage.disk, storage.mount), *fstab.mount(storage.mount)]


def _format(where: str, path: str, there: Disk) -> list[Change]:
    """The change that makes a file system on an empty disk; none if `provision` has already made the file system.

    where: the name of the node. Raises Unanswered if the disk does not exist or is not empty.
    """
    if there.path is None:
        raise Unanswered(f"{where}: there is no disk {path}: lsblk on this node lists its disks; correct storage.disk")
    if there.ours:
        return []
    if there.holds:
        raise Unanswered(
            f"{where}: {path} is not empty and was not changed: {', '.join(there.holds)}. Set storage.disk to an empty disk, "
            "or, if its data is no longer needed, erase it yourself on this node"
        )
    make = f"{EMPTY.format(disk=path)}\n{FORMAT.format(label=LABEL, disk=path)}"
    return [shell(f"make an ext4 file system on {path}, which is empty", make, timeout_s=MAKE_S)]


def _entry(path: str, mount: str) -> Change:
    """The change that adds the disk to /etc/fstab. Without the option nofail, a node with a broken disk would not boot."""
    uuid = f"UUID=$(blkid --probe --match-tag UUID --output value -- {path})"
    return fstab.add(f"mount {path} at {mount} at every boot (/etc/fstab)", f"{uuid} {mount} ext4 defaults,nofail 0 2")


DISKS = Operation("disks", plan)
