"""Checks that all nodes have the same Python and the same packages, because a result with mixed versions has no meaning."""

from __future__ import annotations

from provision.check import Check, Outcome, absent_nodes_note, map_targets
from provision.facts.environment import ENVIRONMENT
from provision.operation import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if all nodes report the same version of Python and the same digests of packages and source."""
    targets = site.active_targets
    environments = map_targets(targets, lambda member: member.facts[ENVIRONMENT])
    environment_texts = [f"Python {env.version}, packages {env.packages}, source {env.source}" for env in environments]
    if len(set(environment_texts)) == 1:
        return Outcome(True, f"equal on {len(targets)} nodes: {environment_texts[0]}{absent_nodes_note(site)}")
    node_clauses = "; ".join(f"{member.node.name}: {text}" for member, text in zip(targets, environment_texts, strict=True))
    return Outcome(False, f"the nodes differ: {node_clauses}", "run: provision CLUSTER.yaml --only environment")


ENVIRONMENTS = Check("environments", run, once=True)
