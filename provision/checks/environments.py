"""The same Python and the same packages on all nodes: two versions that train together give a result of neither."""

from __future__ import annotations

from provision.checks import Check, Outcome
from provision.facts.environment import ENVIRONMENT
from provision.operations import Site, Target


def run(site: Site, target: Target) -> Outcome:
    found = {one.node.name: one.facts[ENVIRONMENT] for one in site.targets}
    told = {f"Python {one.version}, packages {one.packages}, source {one.source}" for one in found.values()}
    if len(told) == 1:
        return Outcome(True, f"equal on {len(found)} nodes: {told.pop()}")
    says = "; ".join(
        f"{name}: Python {one.version}, packages {one.packages}, source {one.source}" for name, one in found.items()
    )
    return Outcome(False, f"they differ: {says}", "run: provision CLUSTER.yaml --only environment")


ENVIRONMENTS = Check("environments", run, once=True)
