"""Installs the user-space libraries of RDMA on nodes with an RDMA card: without them, NCCL falls back to TCP."""

from __future__ import annotations

from provision.facts.rdma import RDMA
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, Site, Target
from provision.operations.packages import find_missing_packages, make_install_changes

RDMA_PACKAGES = ("rdma-core", "ibverbs-utils")


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Install the missing libraries on a node that has RDMA links. Raises Unanswered."""
    if target.facts[SYSTEM].is_container:
        return Nothing("it is a container, which uses the network of its host")
    rdma_links = target.facts[RDMA]
    if not rdma_links:
        return Nothing("it has no RDMA card")
    missing = find_missing_packages(site, target, RDMA_PACKAGES)
    return make_install_changes(missing) if missing else Nothing(f"{', '.join(link.name for link in rdma_links)} can be used")


LIBRARIES = Operation("rdma", plan)
