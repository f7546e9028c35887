"""A failure is attributed to the node that failed, even if another node ran the operation. All other nodes continue."""

import msgspec
import pytest

from provision.fact import FactAnswers, FactQuery, Unanswered
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.services import SERVICES
from provision.facts.system import SYSTEM
from provision.operation import LocalCall, Nothing, Operation, RunCommand, Site, Target
from provision.operations import munge, slurm
from provision.operations.inventory import INVENTORY
from provision.plan import PlanObserver, converge_site
from provision.providers.ssh import SshNode
from provision.verbs import nodes
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.remote.remote import Unreachable
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace
from tests.provision.operations.test_operations import RUNNING, site


class Cut:
    """A connection whose other end is gone."""

    def run(self, argv, **options):
        raise Unreachable("10.0.0.3: cannot be reached: no route to host.")


def cut(target) -> None:
    """Makes this node unreachable from now on. Facts that were read before are still known."""
    node = target.node
    gone = SshNode(node.name, node.host, None, None, None, node.python, remote=Cut())
    msgspec.structs.force_setattr(target, "node", gone)
    target.facts.node = gone


def states(steps):
    return {(step.node, step.operation): step.state for step in steps}


def run(one, *operations):
    names = {operation.name for operation in operations}
    return converge_site(one, operations, targets=one.targets, only_names=names, is_dry_run=False)


def test_a_worker_unreachable_for_the_inventory_fails_and_not_the_controller(tmp_path):
    made = site()
    one = Site(made.cluster, Workspace(tmp_path), made.targets)
    for target in one.targets:
        target.facts.answers |= {ENVIRONMENT.name: InstalledEnvironment(source="x"), ADDRESSES.name: {}}
    worker = one.targets[2]
    cut(worker)
    worker.facts.forget_answers()
    after = Operation("after", lambda site, target: Nothing(f"{target.node.name} goes on"))
    steps = run(one, INVENTORY, after)
    assert states(steps) == {
        ("head", "inventory"): "nothing to do",
        ("w2", "inventory"): "failed",
        ("head", "after"): "nothing to do",
        ("w1", "after"): "nothing to do",
        ("w2", "after"): "not reached",
    }
    assert steps[0].says == ["not changed: the inventory describes all nodes, and w2 cannot be asked"]
    assert "10.0.0.3: cannot be reached" in steps[1].says[0]
    work = nodes.NodesVerbInput(one, [worker], [], set(), None)
    (finding,) = nodes._run_checks(Output(), work, steps, replaces=False)
    assert (finding.node, finding.outcome.says.startswith("inventory failed: ")) == ("w2", True)
    assert "10.0.0.3: cannot be reached" in finding.outcome.says


def test_a_controller_that_goes_away_while_a_worker_copies_from_it_fails_itself():
    one = site(services=RUNNING)
    head, w1, w2 = one.targets
    head.facts.answers[SERVICES.name] = RUNNING
    cut(head)
    w1.facts.answers[SERVICES.name] = w2.facts.answers[SERVICES.name] = RUNNING
    steps = run(one, munge.MUNGE)
    assert states(steps) == {("head", "munge"): "failed", ("w1", "munge"): "nothing to do", ("w2", "munge"): "nothing to do"}
    assert all("cannot be asked" in step.says[0] for step in steps if step.node != "head")


def test_a_worker_whose_facts_fail_during_the_controllers_change_fails_itself():
    one = site()
    head, _, w2 = one.targets
    head.facts.answers[SERVICES.name] = RUNNING
    why = "w2: the fact 'system' cannot be read: x"
    w2.facts.answers[SYSTEM.name] = Unanswered(why, {"w2": why})
    steps = converge_site(one, [slurm.CONTROLLER], targets=one.targets, only_names={"slurm-controller"}, is_dry_run=True)
    assert states(steps) == {
        ("head", "slurm-controller"): "would change",
        ("w1", "slurm-controller"): "nothing to do",
        ("w2", "slurm-controller"): "failed",
    }
    assert one.skipped == {"w2": "slurm-controller failed"}


def two(plan) -> tuple[Site, Operation]:
    entries = [NodeEntry(name="a"), NodeEntry(name="b")]
    cluster = Cluster(schema=1, name="bench", provider="ssh", nodes=entries)
    nodes = [SshNode(entry.name, entry.name, None, None, None, "python", remote=Cut()) for entry in entries]
    found = [Target(node, FactAnswers(node), entry) for node, entry in zip(nodes, entries, strict=True)]
    return Site(cluster, None, found), Operation("try", plan)


def test_a_node_with_a_failed_operation_gets_no_later_operation():
    """After an operation failed on node a, no later operation is planned or run there; node b continues."""
    asked, planned = [], []

    def fails(site, target):
        planned.append(target.node.name)
        if target.node.name == "a":
            raise Unanswered("a: it is broken", {"a": "a: it is broken"})
        return Nothing("fine")

    def after(site, target):
        asked.append(target.node.name)
        return [LocalCall("go on", lambda: asked.append(f"{target.node.name} changed"))]

    one, first = two(fails)
    steps = run(one, first, Operation("after", after))
    assert sorted(planned) == ["a", "b"]  # neither node is planned a second time
    assert asked == ["b", "b changed"]
    assert states(steps)["a", "after"] == "not reached"
    assert [step.says for step in steps if step.node == "a"] == [["a: it is broken"], ["try failed"]]


def test_changes_made_before_another_node_failed_are_reported_and_the_rest_made():
    made = []

    def fails_elsewhere():
        raise Unanswered("b: broken", {"b": "b: broken"})

    def plan(site, target):
        if target.node.name == "b":
            return Nothing("b has nothing to do")
        if "b" in site.skipped:
            return [LocalCall("third", lambda: made.append(3))] if made == [1] else Nothing("all is done")
        return [LocalCall("first", lambda: made.append(1)), LocalCall("second", fails_elsewhere)]

    one, operation = two(plan)
    steps = run(one, operation)
    assert made == [1, 3]
    assert [(step.node, step.state, step.says, step.changes) for step in steps] == [
        ("a", "changed", ["first", "third"], 2),
        ("b", "failed", ["b: broken"], 0),
    ]


def test_an_operation_that_needs_a_failed_node_fails_on_its_own_node_too():
    def plan(site, target):
        if target.node.name == "b":
            return Nothing("nothing")
        raise Unanswered("b: broken", {"b": "b: broken"})

    one, operation = two(plan)
    assert states(run(one, operation)) == {("a", "try"): "failed", ("b", "try"): "failed"}


def test_an_exception_of_a_change_or_fact_names_the_node_that_failed():
    """The exception of a change or fact names the node that failed in `reasons_by_node`."""
    one, _ = two(None)
    with pytest.raises(Unreachable) as caught:
        RunCommand("do it", ["true"]).make(one.targets[1].node)
    assert caught.value.reasons_by_node == {"b": "10.0.0.3: cannot be reached: no route to host."}
    fact = FactQuery("five", lambda python: ["five"], int, timeout_s=1)
    with pytest.raises(Unanswered) as unanswered:
        one.targets[0].facts[fact]
    assert list(unanswered.value.reasons_by_node) == ["a"]


def test_a_node_blamed_by_another_node_is_reported_as_failed():
    """Node a reports that node b failed. The observer is told that b failed, and a is planned again without b."""
    told = []

    class Told(PlanObserver):
        def record_end(self, step):
            told.append((step.node, step.state))

    def plan(site, target):
        if target.node.name == "a" and "b" not in site.skipped:
            raise Unanswered("b: broken", {"b": "b: broken"})
        return Nothing("fine")

    one, _ = two(plan)
    steps = converge_site(
        one, [Operation("try", plan, once=True)], targets=one.targets, only_names={"try"}, is_dry_run=False, observer=Told()
    )
    assert ("b", "failed") in told
    assert states(steps) == {("a", "try"): "nothing to do", ("b", "try"): "failed"}
