"""Before anything is changed: room for what is to be installed, as half an installation is worse than none."""

from __future__ import annotations

from provision import software
from provision.facts import Unanswered
from provision.facts.environment import ENVIRONMENT
from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.operations import Change, Nothing, Operation, Site, Target
from provision.operations.packages import wanted

GIB = 2**30
PACKAGES_BYTES, PACKAGES_INODES = 2 * GIB, 30_000  # Slurm, MariaDB and their state, with room
# The tested set for CPUs alone came to 1.3 GB in 38,000 files from 0.3 GB of wheels. From an index torch comes with CUDA's
# libraries: some 7 GB, beside 4 GB of wheels while they are unpacked.
WHEELHOUSE_BYTES, INDEX_BYTES, ENVIRONMENT_INODES = 2 * GIB, 12 * GIB, 60_000


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Never a change. Raises Unanswered where there is too little room on the root file system."""
    purposes: list[tuple[str, int, int]] = []
    found = target.facts[PACKAGES].versions
    if any(name not in found for name in wanted(site, target)):
        purposes.append(("packages", PACKAGES_BYTES, PACKAGES_INODES))
    if site.cluster.storage.shared is None and target.facts[ENVIRONMENT].packages != software.digest():
        room = INDEX_BYTES if target.node.wheelhouse is None else WHEELHOUSE_BYTES
        purposes.append(("the Python environment", room, ENVIRONMENT_INODES))
    if not purposes:
        return Nothing("nothing large is to be installed on its root file system")
    system = target.facts[SYSTEM]
    what = " and ".join(name for name, _, _ in purposes)
    needed, inodes = sum(room for _, room, _ in purposes), sum(count for _, _, count in purposes)
    if system.free_bytes < needed:
        raise Unanswered(
            f"{target.node.name}: {system.free_bytes / GIB:.1f} GiB are free on /, and {what} may take {needed / GIB:.0f} GiB; "
            "nothing was changed. Make room there, or put storage.shared on a larger disk."
        )
    if 0 < system.free_inodes < inodes:  # 0: a file system that counts none, such as btrfs
        raise Unanswered(
            f"{target.node.name}: {system.free_inodes} inodes are free on /, and {what} may take {inodes}; nothing was "
            "changed. Remove small files there, or put storage.shared on another disk."
        )
    return Nothing(f"{system.free_bytes / GIB:.1f} GiB are free on /, and {what} may take {needed / GIB:.0f} GiB")


SPACE = Operation("space", plan)
