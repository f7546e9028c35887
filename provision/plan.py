"""Plans and applies operations. A dry run executes the same code, but makes no changes, so it shows what `apply` would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from provision.fact import Unanswered
from provision.interruption import IS_STOPPING
from provision.node import Node
from provision.operation import Change, Nothing, Operation, Site, Target
from provision.operations.reboot import Reboot
from shardlab.remote.remote import Unreachable

State = Literal["changed", "would change", "nothing to do", "skipped", "failed", "not reached", "administrator"]
MACHINE_OPERATION = "machine"  # the name of the operation by which a provider starts the nodes
BEGUN_CHANGES: list[str] = []  # the changes that this process has begun, in order


class OperationStep(msgspec.Struct, frozen=True):
    """What one operation did, or would do, on one node."""

    node: str
    operation: str
    state: State
    """`administrator` means that the changes need root, which the user does not have, and that nothing was changed."""
    says: list[str]
    """A sentence for each change, or the reason why there is no change."""
    changes: int = 0
    commands: list[str] = []
    """The commands that make the changes; in the state administrator, scripts to run as root."""


class PlanObserver:
    """Observes the progress of operations on each node. Several threads call its methods. This base class does nothing."""

    def record_start(self, node: str, operation: str) -> None:
        """Called when an operation begins on a node."""

    def record_change(self, node: str, description: str) -> None:
        """Called before the operation makes a change on the node."""

    def record_end(self, step: OperationStep) -> None:
        """Called when an operation has ended on a node. step: the result of the operation."""


def converge_site(
    site: Site,
    operations: Sequence[Operation],
    *,
    targets: Sequence[Target],
    only_names: set[str],
    is_dry_run: bool,
    max_parallel: int | None = None,
    observer: PlanObserver = PlanObserver(),  # noqa: B008 (this default object has no state)
) -> list[OperationStep]:
    """Carry out `operations`, one after the other, each on all `targets` at the same time. Raises WorkspaceError.

    only_names: the names of the operations that are carried out; the others are skipped.
    is_dry_run: only plan; change nothing.
    max_parallel: the most nodes on which an operation runs at the same time; None: all.

    If an operation fails on a node, later operations skip this node; the other nodes continue. If an operation on a node A
    fails because of a node B, node B counts as failed, and the operation is planned again on node A without node B. If an
    operation needs an administrator on a node, later operations are only planned on this node, so that all commands for the
    administrator are known.
    """
    steps: list[OperationStep] = []
    skipped = site.skipped
    with ThreadPoolExecutor(max_parallel or max(1, len(targets))) as thread_pool:
        for operation in operations:
            active_targets = [target for target in targets if target.node.name not in skipped]
            skipped_names = [] if operation.once else [target.node.name for target in targets if target.node.name in skipped]
            blamed = BlamedNodes(site, operation.name)

            def work(target: Target, operation: Operation = operation, blamed_nodes: BlamedNodes = blamed) -> OperationStep:
                observer.record_start(target.node.name, operation.name)
                step = _carry_out_on_node(site, target, operation, only_names, blamed_nodes, observer, is_dry_run=is_dry_run)
                if not IS_STOPPING.is_set():  # not shown after an interruption, which makes steps fail
                    observer.record_end(step)
                return step

            direct_steps = list(thread_pool.map(work, active_targets[:1] if operation.once else active_targets))
            judged_steps = blamed.judge_steps(direct_steps)
            skipped_steps = [OperationStep(name, operation.name, "not reached", [skipped[name]]) for name in skipped_names]
            if IS_STOPPING.is_set():
                break
            for step in [*(step for step in judged_steps if step not in direct_steps), *skipped_steps]:
                observer.record_end(step)
            steps += [*judged_steps, *skipped_steps]
            skipped.update({step.node: f"{operation.name} failed" for step in judged_steps if step.state == "failed"})
            if operation.name == MACHINE_OPERATION:
                skipped.update(
                    {step.node: "known only after this machine is up" for step in judged_steps if step.state == "would change"}
                )
            if site.is_pretended:
                skipped.clear()  # in a dry run, an operation can be planned although an earlier operation failed
    return steps


class BlamedNodes:
    """The nodes that made an operation fail on other nodes, and why. Several threads call `add_blame`."""

    def __init__(self, site: Site, operation_name: str) -> None:
        self._site, self._operation = site, operation_name
        self._reason_by_node: dict[str, str] = {}

    def add_blame(self, error: Unanswered | Unreachable, asking_node: str) -> set[str]:
        """Make later operations and checks skip the nodes that `error` names. Returns the names of these nodes.

        asking_node: the node on which the operation raised `error`. If `error` names this node, too, no node is skipped.
        """
        if asking_node in error.reasons_by_node:
            return set()
        self._reason_by_node.update(error.reasons_by_node)
        self._site.skipped.update(dict.fromkeys(error.reasons_by_node, f"{self._operation} failed"))
        return set(error.reasons_by_node)

    def judge_steps(self, steps: Sequence[OperationStep]) -> list[OperationStep]:
        """The steps of the operation, in which every blamed node has failed, even if its own thread reported success."""
        step_by_node = {step.node: step for step in steps}
        judged_steps = [step for step in steps if step.state == "failed" or step.node not in self._reason_by_node]
        for node_name, blame_reason in self._reason_by_node.items():
            step = step_by_node.get(node_name)
            if step is None:
                judged_steps.append(OperationStep(node_name, self._operation, "failed", [blame_reason]))
            elif step.state != "failed":
                sentences = [*step.says, blame_reason] if step.changes else [blame_reason]
                judged_steps.append(OperationStep(node_name, self._operation, "failed", sentences, step.changes, step.commands))
        return judged_steps


def _carry_out_on_node(
    site: Site,
    target: Target,
    operation: Operation,
    only_names: set[str],
    blamed: BlamedNodes,
    observer: PlanObserver,
    *,
    is_dry_run: bool,
) -> OperationStep:
    node = target.node
    if operation.name not in only_names:
        return OperationStep(node.name, operation.name, "skipped", ["excluded by --only or --skip"])
    done: list[Change] = []
    blamed_nodes: set[str] = set()
    while True:
        try:
            planned_changes = operation.plan(site, target)
            if (waiting_step := _administrator_step(site, node, operation, planned_changes, is_dry_run=is_dry_run)) is not None:
                return waiting_step
            if not isinstance(planned_changes, Nothing) and not is_dry_run:
                _make_changes(node, _observe_changes(node, planned_changes, observer), done)
                _continue_after_reboot(site, target, operation, done)
            break
        except (Unanswered, Unreachable) as error:
            other_nodes = blamed.add_blame(error, node.name)
            if other_nodes <= blamed_nodes:  # `error` names no other node, or only nodes that are already skipped
                sentences = [*(change.description for change in done), str(error)]
                return OperationStep(node.name, operation.name, "failed", sentences, len(done), _list_change_commands(done))
            blamed_nodes |= other_nodes
        finally:
            if done:
                target.forget_facts()
    if isinstance(planned_changes, Nothing) and not done:
        return OperationStep(node.name, operation.name, "nothing to do", [planned_changes.why])
    changes = planned_changes if is_dry_run and not isinstance(planned_changes, Nothing) else done
    sentences = [change.description for change in changes]
    return OperationStep(
        node.name,
        operation.name,
        "would change" if is_dry_run else "changed",
        sentences,
        len(changes),
        _list_change_commands(changes),
    )


def _administrator_step(
    site: Site, node: Node, operation: Operation, changes: Sequence[Change] | Nothing, *, is_dry_run: bool
) -> OperationStep | None:
    """The step of an operation that cannot be carried out on a node without sudo; None if the operation can be carried out.

    Either the operation itself needs root, or an earlier operation needs root, so that this operation has to wait.
    """
    if node.may_sudo or isinstance(changes, Nothing):
        return None
    if root_changes := [change for change in changes if change.script]:
        site.waiting_operations_by_node.setdefault(node.name, []).append(operation.name)
        change_sentences = [change.description for change in root_changes]
        root_scripts = [change.script for change in root_changes]
        return OperationStep(node.name, operation.name, "administrator", change_sentences, commands=root_scripts)
    if (waiting := site.waiting_operations_by_node.get(node.name)) and not is_dry_run:
        return OperationStep(node.name, operation.name, "not reached", [f"waits for an administrator: {', '.join(waiting)}"])
    return None


def _observe_changes(node: Node, changes: Sequence[Change], observer: PlanObserver) -> Iterator[Change]:
    for change in changes:
        observer.record_change(node.name, change.description)
        yield change


def _make_changes(node: Node, changes: Iterable[Change], made_changes: list[Change]) -> None:
    for change in changes:
        if IS_STOPPING.is_set():
            raise Unanswered(f"{node.name}: this program was interrupted")
        BEGUN_CHANGES.append(change.description)
        change.make(node)
        made_changes.append(change)


def _continue_after_reboot(site: Site, target: Target, operation: Operation, made_changes: list[Change]) -> None:
    """If the operation rebooted a node, plan it again and make its other changes. Fails if it would reboot the node again."""
    if not any(isinstance(change, Reboot) for change in made_changes):
        return
    target.forget_facts()
    other_changes = operation.plan(site, target)
    if isinstance(other_changes, Nothing):
        return
    second_reboot = next((change for change in other_changes if isinstance(change, Reboot)), None)
    if second_reboot is not None:
        raise Unanswered(
            f"{target.node.name}: it was rebooted once, but still {second_reboot.reason}; inspect this node by hand"
        )
    _make_changes(target.node, other_changes, made_changes)


def _list_change_commands(changes: Sequence[Change]) -> list[str]:
    return [change.command for change in changes if change.command]
