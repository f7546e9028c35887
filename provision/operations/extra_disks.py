"""The local disk of a CloudLab node at /mydata: a blockstore of the experiment, or the unused space of the boot disk.

A blockstore is made and mounted by CloudLab before the node is ready. Without one, CloudLab's own program mkextrafs.pl makes a
file system in an unused partition. mkextrafs.pl is never called with -f: with this option, it overwrites partitions in use.
"""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.mkextrafs import MKEXTRAFS, MKEXTRAFS_PATH
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target
from provision.operations import fstab
from shardlab.cluster.cloudlab_keys import EXTRA_DISK

MAKE_S = 900.0  # time limit of mkextrafs.pl, which takes minutes on a spinning disk of several terabytes


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make sure that a file system is mounted at /mydata. Raises Unanswered if nothing can be mounted there."""
    node_name = target.node.name
    if site.cluster.storage.mount == EXTRA_DISK:
        return Nothing(f"storage.disk is mounted at {EXTRA_DISK}")
    folders = [path for path in (site.cluster.storage.shared, site.cluster.data.path) if path is not None]
    if not any(EXTRA_DISK in fstab.list_required_mounts(site, target, folder) for folder in folders):
        return Nothing(f"cluster.yaml names no folder of this node in {EXTRA_DISK}")
    mount_place = fstab.inspect_mount(target, EXTRA_DISK)
    if mount_place.mount is not None:
        return Nothing(f"{mount_place.mount.source} is mounted at {EXTRA_DISK}")
    if mount_place.fstab is not None:
        return fstab.make_mount_changes(EXTRA_DISK)
    if not target.facts[MKEXTRAFS]:
        raise Unanswered(
            f"{node_name}: nothing is mounted at {EXTRA_DISK}, and {MKEXTRAFS_PATH} does not exist: request the experiment "
            f"with cloudlab.blockstore_gib, or choose a folder outside {EXTRA_DISK}"
        )
    return [
        RunCommand(f"make the folder {EXTRA_DISK}", ["mkdir", "-p", "--", EXTRA_DISK]),
        # The program runs in a session of its own, so that Ctrl-C or a time limit does not leave an incomplete file system.
        # With -q, its exit code is 0 if something is already mounted at /mydata.
        RunCommand(
            f"make a file system in the unused space of the boot disk, and mount it at {EXTRA_DISK} now and at every boot",
            ["setsid", "--wait", MKEXTRAFS_PATH, "-q", EXTRA_DISK],
            MAKE_S,
        ),
        RunCommand(f"check that a file system is mounted at {EXTRA_DISK}", ["mountpoint", "-q", "--", EXTRA_DISK]),
    ]


EXTRA_DISKS = Operation("extra-disks", plan)
