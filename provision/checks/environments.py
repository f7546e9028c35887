"""Checks that all nodes have the same Python and the same packages, because a result with mixed versions has no meaning."""

from __future__ import annotations

from provision.check import Check, Outcome, absent_nodes_note, map_targets
from provision.facts.environment import ENVIRONMENT
from provision.operation import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if all nodes report the same version of Python and the same digests of packages and source."""
    targets = site.active_targets
    environments = map_targets(targets, lambda member: member.facts[ENVIRONMENT])
    descriptions = [
        f"Python {environment.version}, packages {environment.packages}, source {environment.source}"
        for environment in environments
    ]
    if len(set(descriptions)) == 1:
        return Outcome(True, f"equal on {len(targets)} nodes: {descriptions[0]}{absent_nodes_note(site)}")
    differences = "; ".join(
        f"{member.node.name}: {description}" for member, description in zip(targets, descriptions, strict=True)
    )
    return Outcome(False, f"the nodes differ: {differences}", "run: provision CLUSTER.yaml --only environment")


ENVIRONMENTS = Check("environments", run, once=True)
