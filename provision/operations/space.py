"""Checks, before anything is changed, that Python is new enough, and that there is space for all that will be installed."""

from __future__ import annotations

from pathlib import PurePosixPath

from provision import software
from provision.fact import Unanswered
from provision.facts.environment import ENVIRONMENT
from provision.facts.mounts import place
from provision.facts.room import Room, room
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, Site, Target
from provision.operations.fstab import own_disks
from provision.operations.packages import lacking, nfs_server, wanted

GIB = 2**30
PACKAGES_BYTES, PACKAGES_INODES = 2 * GIB, 30_000  # Slurm, MariaDB and their state, with room
# The tested set for CPUs alone came to 1.3 GB in 38,000 files from 0.3 GB of wheels. From an index torch comes with CUDA's
# libraries: some 7 GB, beside 4 GB of wheels while they are unpacked.
WHEELHOUSE_BYTES, INDEX_BYTES, ENVIRONMENT_INODES = 2 * GIB, 12 * GIB, 60_000


# The Python of releases that are older than ours, by their code name. No package of such a release installs a newer one.
OLD_PYTHONS = {"bullseye": "3.9", "focal": "3.8", "jammy": "3.10"}


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Never a change. Raises Unanswered where there is too little room, or the Python of the system is too old."""
    system = target.facts[SYSTEM]
    if target.node.may_sudo and target.node.venv_python == "python3" and system.codename in OLD_PYTHONS:
        raise Unanswered(
            f"{target.node.name}: {system.pretty} has Python {OLD_PYTHONS[system.codename]}, and shardlab needs 3.11 or newer; "
            "nothing was installed. Use Ubuntu 24.04, Debian 12, or a newer release of them"
        )
    root = target.facts[room("/")]
    purposes: dict[str, list[tuple[str, int, int]]] = {}
    if lacking(site, target, wanted(site, target)):
        purposes["/"] = [("packages", PACKAGES_BYTES, PACKAGES_INODES)]
    where = _environment(site, target)
    if where is not None:
        needed = INDEX_BYTES if target.node.wheelhouse is None else WHEELHOUSE_BYTES
        purposes.setdefault(where.mount, []).append(("the Python environment", needed, ENVIRONMENT_INODES))
    told = [
        _fits(target.node.name, root if where is None or mount == root.mount else where, of_it)
        for mount, of_it in purposes.items()
    ]
    return Nothing("; ".join(told) or "nothing large will be installed on it")


def _environment(site: Site, target: Target) -> Room | None:
    """The space for the Python environment; None if it exists, or if another node checks this file system."""
    storage = site.cluster.storage
    if storage.shared is not None:
        server = nfs_server(site)
        if target is not (server or site.targets[0]):  # others see it once it is mounted
            return None
        if any(not target.facts[place(disk)].mount for disk in own_disks(site, target, storage.shared)):
            return None  # a disk without a file system yet, all of which will be room
    if target.facts[ENVIRONMENT].packages == software.digest():
        return None
    return target.facts[room(str(PurePosixPath(target.node.python).parent.parent))]


def environment_fits(target: Target, *, from_index: bool) -> None:
    """Raises Unanswered if the file system of the Python environment has too little room for it. A user's quota is not seen."""
    needed = INDEX_BYTES if from_index else WHEELHOUSE_BYTES
    there = target.facts[room(str(PurePosixPath(target.node.python).parent.parent), root=False)]
    _fits(target.node.name, there, [("the Python environment", needed, ENVIRONMENT_INODES)])


def _fits(name: str, there: Room, purposes: list[tuple[str, int, int]]) -> str:
    """A sentence about the free space. Raises Unanswered if it is not enough."""
    what = " and ".join(purpose for purpose, _, _ in purposes)
    needed, inodes = sum(size for _, size, _ in purposes), sum(count for _, _, count in purposes)
    if there.free_bytes < needed:
        raise Unanswered(
            f"{name}: {there.free_bytes / GIB:.1f} GiB are free on {there.mount}, and {what} may take {needed / GIB:.0f} GiB; "
            "nothing was installed. Free some space there, or put storage.shared on a larger disk."
        )
    if 0 < there.free_inodes < inodes:  # 0: a file system that counts none, such as btrfs
        raise Unanswered(
            f"{name}: {there.free_inodes} inodes are free on {there.mount}, and {what} may take {inodes}; nothing was "
            "installed. Remove small files there, or put storage.shared on another disk."
        )
    return f"{there.free_bytes / GIB:.1f} GiB are free on {there.mount}, and {what} may take {needed / GIB:.0f} GiB"


SPACE = Operation("space", plan)
