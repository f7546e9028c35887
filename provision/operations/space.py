"""Checks, before anything is changed, that Python is new enough and that the disk has space for everything to install."""

from __future__ import annotations

from pathlib import PurePosixPath

from provision import software
from provision.fact import Unanswered
from provision.facts.environment import ENVIRONMENT
from provision.facts.mounts import make_mount_query
from provision.facts.room import FreeSpace, make_free_space_query
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, Site, Target
from provision.operations.fstab import list_required_mounts
from provision.operations.packages import find_missing_packages, find_nfs_server, list_needed_packages

GIB = 2**30
PACKAGES_BYTES, PACKAGES_INODES = 2 * GIB, 30_000  # what Slurm, MariaDB and their state need, with a reserve
# The tested packages with torch for CPUs need 1.3 GB in 38,000 files, from 0.3 GB of wheels. The torch of a package index
# includes CUDA's libraries: about 7 GB, and 4 GB of wheels while they are unpacked.
WHEELHOUSE_BYTES, INDEX_BYTES, ENVIRONMENT_INODES = 2 * GIB, 12 * GIB, 60_000


# Releases of Debian and Ubuntu whose Python is too old for shardlab, by code name. They have no package with a newer Python.
OLD_PYTHONS = {"bullseye": "3.9", "focal": "3.8", "jammy": "3.10"}


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Check the free space and the Python of a node, change nothing. Raises Unanswered if space is short or Python too old."""
    system = target.facts[SYSTEM]
    if target.node.may_sudo and target.node.venv_python == "python3" and system.codename in OLD_PYTHONS:
        raise Unanswered(
            f"{target.node.name}: {system.pretty} has Python {OLD_PYTHONS[system.codename]}, and shardlab needs 3.11 or newer; "
            "nothing was installed. Use Ubuntu 24.04, Debian 12, or a newer release of them"
        )
    root_space = target.facts[make_free_space_query("/")]
    purposes: dict[str, list[tuple[str, int, int]]] = {}
    if find_missing_packages(site, target, list_needed_packages(site, target)):
        purposes["/"] = [("packages", PACKAGES_BYTES, PACKAGES_INODES)]
    other_space, missing_environments = _find_environment_space(site, target)
    if other_space is not None:
        sizes = [INDEX_BYTES if missing.node.wheelhouse is None else WHEELHOUSE_BYTES for missing in missing_environments]
        environment_purpose = "the Python environment" if len(sizes) == 1 else f"{len(sizes)} Python environments"
        purposes.setdefault(other_space.mount, []).append((environment_purpose, sum(sizes), len(sizes) * ENVIRONMENT_INODES))
    space_sentences = [
        _check_space(target.node.name, root_space if other_space is None or mount == root_space.mount else other_space, needs)
        for mount, needs in purposes.items()
    ]
    return Nothing("; ".join(space_sentences) or "nothing large will be installed on it")


def _find_environment_space(site: Site, target: Target) -> tuple[FreeSpace | None, list[Target]]:
    """The free space for Python environments, and the node with the interpreter of each environment that does not exist. The
    space is None if all environments exist, or if another node checks their file system."""
    storage = site.cluster.storage
    if storage.shared is not None:
        nfs_server = find_nfs_server(site)
        if target is not (nfs_server or site.targets[0]):  # another node, whose folder this node mounts later, checks the space
            return None, []
        if any(not target.facts[make_mount_query(disk)].mount for disk in list_required_mounts(site, target, storage.shared)):
            return None, []  # the disk has no file system yet: all of it will be free
    missing_environments = [
        environment_target
        for environment_site, environment_target in site.list_environments(target)
        if environment_target.facts[ENVIRONMENT].packages
        != software.compute_packages_digest(own_packages=tuple(environment_site.cluster.environment.packages))
    ]
    if not missing_environments:
        return None, []
    return target.facts[make_free_space_query(str(PurePosixPath(target.node.python).parent.parent))], missing_environments


def check_environment_fits(target: Target, *, from_index: bool) -> None:
    """Check the free space for a Python environment; a quota of the user is not checked. Raises Unanswered if it is too little.

    from_index: whether pip installs from a package index, whose torch needs more space.
    """
    needed_bytes = INDEX_BYTES if from_index else WHEELHOUSE_BYTES
    free_space = target.facts[make_free_space_query(str(PurePosixPath(target.node.python).parent.parent), root=False)]
    _check_space(target.node.name, free_space, [("the Python environment", needed_bytes, ENVIRONMENT_INODES)])


def _check_space(name: str, space: FreeSpace, space_needs: list[tuple[str, int, int]]) -> str:
    """A sentence about the free space on the node `name`. Raises Unanswered if the space is not enough for all purposes.

    space_needs: for each purpose its name, the bytes that it needs, and the number of files that it needs.
    """
    text = " and ".join(purpose for purpose, _, _ in space_needs)
    needed_bytes, needed_inodes = (sum(size for _, size, _ in space_needs), sum(count for _, _, count in space_needs))
    if space.free_bytes < needed_bytes:
        raise Unanswered(
            f"{name}: {space.free_bytes / GIB:.1f} GiB are free on {space.mount}, and {text} may take {needed_bytes / GIB:.0f} "
            "GiB; nothing was installed. Free some space there, or put storage.shared on a larger disk."
        )
    if 0 < space.free_inodes < needed_inodes:  # 0 free inodes: the file system does not count inodes, such as btrfs
        raise Unanswered(
            f"{name}: {space.free_inodes} inodes are free on {space.mount}, and {text} may take {needed_inodes}; nothing was "
            "installed. Remove small files there, or put storage.shared on another disk."
        )
    return f"{space.free_bytes / GIB:.1f} GiB are free on {space.mount}, and {text} may take {needed_bytes / GIB:.0f} GiB"


SPACE = Operation("space", plan)
