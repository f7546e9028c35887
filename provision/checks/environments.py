"""Checks that all nodes have the same Python and the same packages, because a result with mixed versions has no meaning."""

from __future__ import annotations

from provision.check import Check, Outcome, each, without
from provision.facts.environment import ENVIRONMENT
from provision.operation import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if all nodes report the same version of Python and the same digests of packages and source."""
    nodes = site.standing
    environments = each(nodes, lambda one: one.facts[ENVIRONMENT])
    told = [f"Python {one.version}, packages {one.packages}, source {one.source}" for one in environments]
    if len(set(told)) == 1:
        return Outcome(True, f"equal on {len(nodes)} nodes: {told[0]}{without(site)}")
    says = "; ".join(f"{one.node.name}: {said}" for one, said in zip(nodes, told, strict=True))
    return Outcome(False, f"the nodes differ: {says}", "run: provision CLUSTER.yaml --only environment")


ENVIRONMENTS = Check("environments", run, once=True)
