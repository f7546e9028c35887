"""Plans and applies operations. A dry run executes the same code, but makes no changes, so it shows what `apply` would do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from provision.fact import Unanswered
from provision.interruption import STOPPING
from provision.node import Node
from provision.operation import Change, Nothing, Operation, Site, Target
from provision.operations.reboot import Reboot
from shardlab.remote.remote import Unreachable

State = Literal["changed", "would change", "nothing to do", "skipped", "failed", "not reached", "administrator"]
MACHINE = "machine"  # the name of the operation by which a provider starts the nodes
BEGUN: list[str] = []  # the changes that this process has begun, in order


class OperationStep(msgspec.Struct, frozen=True):
    """What one operation did, or would do, on one node.

    state: `administrator` means that the changes need root, which the user does not have, and that nothing was changed.
    says: a sentence for each change, or the reason why there is no change.
    """

    node: str
    operation: str
    state: State
    says: list[str]
    changes: int = 0
    commands: list[str] = []  # the commands that make the changes; in the state administrator, scripts to run as root


class PlanObserver:
    """Observes the progress of operations on each node. Several threads call its methods. This base class does nothing."""

    def begins(self, node: str, operation: str) -> None:
        """Called when an operation begins on a node."""

    def ends(self, step: OperationStep) -> None:
        """Called when an operation has ended on a node. step: the result of the operation."""


def converge(
    site: Site,
    order: Sequence[Operation],
    *,
    targets: Sequence[Target],
    chosen: set[str],
    dry: bool,
    parallel: int | None = None,
    watch: PlanObserver = PlanObserver(),  # noqa: B008 (this default object has no state)
) -> list[OperationStep]:
    """Carry out the operations `order`, one after the other, each on all `targets` at the same time. Raises WorkspaceError.

    chosen: the names of the operations that are carried out; the others are skipped.
    dry: only plan; change nothing.
    parallel: the most nodes on which an operation runs at the same time; None: all.

    If an operation fails on a node, later operations skip this node; the other nodes continue. If an operation on a node A
    fails because of a node B, node B counts as failed, and the operation is planned again on node A without node B. If an
    operation needs an administrator on a node, later operations are only planned on this node, so that all commands for the
    administrator are known.
    """
    steps: list[OperationStep] = []
    skipped = site.skipped
    with ThreadPoolExecutor(parallel or max(1, len(targets))) as pool:
        for operation in order:
            standing = [target for target in targets if target.node.name not in skipped]
            rest = [] if operation.once else [target.node.name for target in targets if target.node.name in skipped]
            blamed = Blamed(site, operation.name)

            def work(target: Target, operation: Operation = operation, blamed: Blamed = blamed) -> OperationStep:
                watch.begins(target.node.name, operation.name)
                step = _step(site, target, operation, chosen, blamed, dry=dry)
                if not STOPPING.is_set():  # not shown after an interruption, which makes steps fail
                    watch.ends(step)
                return step

            own = list(pool.map(work, standing[:1] if operation.once else standing))
            done = blamed.judge(own)
            missed = [OperationStep(name, operation.name, "not reached", [skipped[name]]) for name in rest]
            if STOPPING.is_set():
                break
            for step in [*(step for step in done if step not in own), *missed]:
                watch.ends(step)
            steps += [*done, *missed]
            skipped.update({step.node: f"{operation.name} failed" for step in done if step.state == "failed"})
            if operation.name == MACHINE:
                skipped.update(
                    {step.node: "known only after this machine is up" for step in done if step.state == "would change"}
                )
            if site.pretended:
                skipped.clear()  # in a dry run, an operation can be planned although an earlier operation failed
    return steps


class Blamed:
    """The nodes that made an operation fail on other nodes, and why. Several threads call `note`."""

    def __init__(self, site: Site, operation: str) -> None:
        self._site, self._operation = site, operation
        self._why: dict[str, str] = {}

    def note(self, error: Unanswered | Unreachable, asked: str) -> set[str]:
        """Make later operations and checks skip the nodes that `error` blames. Returns the names of these nodes.

        asked: the node on which the operation raised `error`. If `error` blames this node, too, no node is skipped.
        """
        if asked in error.blames:
            return set()
        self._why.update(error.blames)
        self._site.skipped.update(dict.fromkeys(error.blames, f"{self._operation} failed"))
        return set(error.blames)

    def judge(self, done: Sequence[OperationStep]) -> list[OperationStep]:
        """The steps of the operation, in which every blamed node has failed, even if its own thread reported success."""
        own = {step.node: step for step in done}
        judged = [step for step in done if step.state == "failed" or step.node not in self._why]
        for name, why in self._why.items():
            step = own.get(name)
            if step is None:
                judged.append(OperationStep(name, self._operation, "failed", [why]))
            elif step.state != "failed":
                says = [*step.says, why] if step.changes else [why]
                judged.append(OperationStep(name, self._operation, "failed", says, step.changes, step.commands))
        return judged


def _step(site: Site, target: Target, operation: Operation, chosen: set[str], blamed: Blamed, *, dry: bool) -> OperationStep:
    node = target.node
    if operation.name not in chosen:
        return OperationStep(node.name, operation.name, "skipped", ["excluded by --only or --skip"])
    made: list[Change] = []
    accused: set[str] = set()
    while True:
        try:
            planned = operation.plan(site, target)
            if (waits := _for_an_administrator(site, node, operation, planned, dry=dry)) is not None:
                return waits
            if not isinstance(planned, Nothing) and not dry:
                _make(node, planned, made)
                _after_a_reboot(site, target, operation, made)
            break
        except (Unanswered, Unreachable) as error:
            others = blamed.note(error, node.name)
            if others <= accused:  # `error` blames no other node, or only nodes that are already skipped
                says = [*(change.says for change in made), str(error)]
                return OperationStep(node.name, operation.name, "failed", says, len(made), _commands(made))
            accused |= others
        finally:
            if made:
                target.facts.forget()
    if isinstance(planned, Nothing) and not made:
        return OperationStep(node.name, operation.name, "nothing to do", [planned.why])
    changes = planned if dry and not isinstance(planned, Nothing) else made
    says = [change.says for change in changes]
    return OperationStep(
        node.name, operation.name, "would change" if dry else "changed", says, len(changes), _commands(changes)
    )


def _for_an_administrator(
    site: Site, node: Node, operation: Operation, planned: Sequence[Change] | Nothing, *, dry: bool
) -> OperationStep | None:
    """The step of an operation that cannot be carried out on a node without sudo; None if the operation can be carried out.

    Either the operation itself needs root, or an earlier operation needs root, so that this operation has to wait.
    """
    if node.may_sudo or isinstance(planned, Nothing):
        return None
    if needs := [change for change in planned if change.script]:
        site.administrator.setdefault(node.name, []).append(operation.name)
        says, scripts = [change.says for change in needs], [change.script for change in needs]
        return OperationStep(node.name, operation.name, "administrator", says, commands=scripts)
    if (before := site.administrator.get(node.name)) and not dry:
        return OperationStep(node.name, operation.name, "not reached", [f"waits for an administrator: {', '.join(before)}"])
    return None


def _make(node: Node, changes: Sequence[Change], made: list[Change]) -> None:
    for change in changes:
        if STOPPING.is_set():
            raise Unanswered(f"{node.name}: this program was interrupted")
        BEGUN.append(change.says)
        change.make(node)
        made.append(change)


def _after_a_reboot(site: Site, target: Target, operation: Operation, made: list[Change]) -> None:
    """If the operation rebooted a node, plan it again and make its other changes. Fails if it would reboot the node again."""
    if not any(isinstance(change, Reboot) for change in made):
        return
    target.facts.forget()
    rest = operation.plan(site, target)
    if isinstance(rest, Nothing):
        return
    again = next((change for change in rest if isinstance(change, Reboot)), None)
    if again is not None:
        raise Unanswered(f"{target.node.name}: it was rebooted once, but still {again.why}; inspect this node by hand")
    _make(target.node, rest, made)


def _commands(changes: Sequence[Change]) -> list[str]:
    return [change.command for change in changes if change.command]
