"""Observe, plan, apply: a dry run is the same path stopped before the change, so that it cannot say anything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from provision.facts import Unanswered
from provision.operations import Nothing, Operation, Site, Target

State = Literal["changed", "would change", "nothing to do", "skipped", "failed"]


@dataclass(frozen=True)
class Step:
    """What one operation did, or would do, on one node. `says` holds a sentence per change, or why there is none."""

    node: str
    operation: str
    state: State
    says: list[str]
    changes: int = 0


def converge(site: Site, targets: Iterable[Target], order: Sequence[Operation], chosen: set[str], *, dry: bool) -> list[Step]:
    """Every operation on every node, in order; nothing is changed when `dry`. Raises WorkspaceError."""
    return [_step(site, target, operation, chosen, dry) for target in targets for operation in order]


def _step(site: Site, target: Target, operation: Operation, chosen: set[str], dry: bool) -> Step:
    node = target.node.name
    if operation.name not in chosen:
        return Step(node, operation.name, "skipped", ["left out by --only or --skip"])
    try:
        planned = operation.plan(site, target)
    except Unanswered as error:
        return Step(node, operation.name, "failed", [str(error)])
    if isinstance(planned, Nothing):
        return Step(node, operation.name, "nothing to do", [planned.why])
    for made, change in enumerate([] if dry else planned):
        try:
            change.make()
        except Unanswered as error:
            return Step(node, operation.name, "failed", [*(c.says for c in planned[:made]), str(error)], made)
    says = [change.says for change in planned]
    return Step(node, operation.name, "would change" if dry else "changed", says, len(planned))
