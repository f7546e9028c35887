"""Observe, plan, apply: a dry run is the same path stopped before the change, so that it cannot say anything else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from provision.facts import Unanswered
from provision.operations import Change, Nothing, Operation, Site, Target
from provision.operations.reboot import Reboot
from provision.providers import Node
from shardlab.remote import Unreachable

State = Literal["changed", "would change", "nothing to do", "skipped", "failed", "not reached"]
MACHINE = "machine"  # the operation by which a provider brings nodes up


@dataclass(frozen=True)
class Step:
    """What one operation did, or would do, on one node. `says` holds a sentence per change, or why there is none."""

    node: str
    operation: str
    state: State
    says: list[str]
    changes: int = 0
    commands: list[str] = field(default_factory=list)  # what was run for it, or would be


class Watch:
    """Who is told, by several threads, how far each node is; this one keeps it to itself."""

    def begins(self, node: str, operation: str) -> None:
        """An operation is looked into on a node."""

    def ends(self, step: Step) -> None:
        """What came of it."""


def converge(
    site: Site,
    order: Sequence[Operation],
    *,
    targets: Sequence[Target],
    chosen: set[str],
    dry: bool,
    parallel: int | None = None,
    watch: Watch = Watch(),  # noqa: B008 (it holds nothing)
) -> list[Step]:
    """Every operation on every node: one operation after the other, each on all nodes at once, or on `parallel` of them.

    A node on which one failed is left alone by those after it; the others go on. Nothing is changed when `dry`.
    Raises WorkspaceError.
    """
    steps: list[Step] = []
    left = site.left
    with ThreadPoolExecutor(parallel or max(1, len(targets))) as pool:
        for operation in order:
            standing = [target for target in targets if target.node.name not in left]
            rest = [] if operation.once else [target.node.name for target in targets if target.node.name in left]

            def work(target: Target, operation: Operation = operation) -> Step:
                watch.begins(target.node.name, operation.name)
                step = _step(site, target, operation, chosen, dry)
                watch.ends(step)
                return step

            done = list(pool.map(work, standing[:1] if operation.once else standing))
            missed = [Step(name, operation.name, "not reached", [left[name]]) for name in rest]
            for step in missed:
                watch.ends(step)
            steps += [*done, *missed]
            left.update({step.node: f"{operation.name} failed" for step in done if step.state == "failed"})
            if operation.name == MACHINE:
                left.update({step.node: "to be seen once it is up" for step in done if step.state == "would change"})
    return steps


def _step(site: Site, target: Target, operation: Operation, chosen: set[str], dry: bool) -> Step:
    node = target.node
    if operation.name not in chosen:
        return Step(node.name, operation.name, "skipped", ["left out by --only or --skip"])
    made: list[Change] = []
    try:
        planned = operation.plan(site, target)
        if isinstance(planned, Nothing):
            return Step(node.name, operation.name, "nothing to do", [planned.why])
        if not dry:
            _make(node, planned, made)
            planned = [*planned, *_after_a_reboot(site, target, operation, made)]
    except (Unanswered, Unreachable) as error:
        return Step(node.name, operation.name, "failed", [*(c.says for c in made), str(error)], len(made), _commands(made))
    finally:
        if made:
            target.facts.forget()
    says = [change.says for change in planned]
    return Step(node.name, operation.name, "would change" if dry else "changed", says, len(planned), _commands(planned))


def _make(node: Node, changes: Sequence[Change], made: list[Change]) -> None:
    for change in changes:
        change.make(node)
        made.append(change)


def _after_a_reboot(site: Site, target: Target, operation: Operation, made: list[Change]) -> Sequence[Change]:
    """What an operation that rebooted a node has left to do there, done; a second reboot would go round in circles."""
    if not any(isinstance(change, Reboot) for change in made):
        return []
    target.facts.forget()
    rest = operation.plan(site, target)
    if isinstance(rest, Nothing):
        return []
    again = next((change for change in rest if isinstance(change, Reboot)), None)
    if again is not None:
        raise Unanswered(f"{target.node.name}: it was rebooted once, and {again.why} all the same; a person has to look")
    _make(target.node, rest, made)
    return rest


def _commands(changes: Sequence[Change]) -> list[str]:
    return [change.command for change in changes if change.command]
