"""Checks run in stages; all checks of a stage run at the same time. An unreachable node is reported once, and no check waits
for this node."""

import threading

import pytest
from support_e2e import HANG_S

from provision.check import Check, Outcome, absent_nodes_note, map_targets
from provision.command import display
from provision.fact import FactAnswers, FactQuery
from provision.operation import Site, Target
from provision.verify import Finding, is_verified, verify_targets
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.remote.remote import CommandOutput, Unreachable
from shardlab.terminal.console import Output


class Node:
    """A fake node that gives the same answer to every command, or raises it if the answer is an exception."""

    host, port, user, python, wheelhouse, may_sudo = "10.0.0.1", None, None, "python", None, True

    def __init__(self, name, answer=None):
        self.name, self.answer, self.asked = name, answer or CommandOutput(0, "", ""), []

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False):
        self.asked.append(argv)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def site(*nodes):
    cluster = Cluster(schema=1, name="bench", provider="ssh")
    return Site(cluster, None, [Target(node, FactAnswers(node), NodeEntry(name=node.name)) for node in nodes])


def passes(says="good"):
    return lambda site, target: Outcome(True, f"{says}{absent_nodes_note(site)}")


def test_the_checks_of_a_stage_run_at_the_same_time():
    """Five checks of a stage wait for each other at a barrier, which works only if they run at the same time."""
    one = site(Node("w1"), Node("w2"))
    all_there = threading.Barrier(5, timeout=HANG_S)

    def run(site, target):
        all_there.wait()
        return Outcome(True, "")

    stages = [[Check("a", run), Check("b", run), Check("c", run, once=True)], [Check("d", passes())]]
    begun = []
    findings = verify_targets(one, one.targets, stages, begun.append)
    assert begun == ["checking a, b, c", "checking d"]
    told = [(f.node, f.check) for f in findings]
    assert told == [("w1", "a"), ("w2", "a"), ("w1", "b"), ("w2", "b"), ("w1", "c"), ("w1", "d"), ("w2", "d")]


def test_a_node_that_is_away_is_named_once_and_the_others_are_proven_without_it():
    dead, hung = Node("w1", Unreachable("w1: cannot be reached: no route.")), Node("w2", CommandOutput(None, "", ""))
    one = site(dead, hung, Node("w3"))
    findings = verify_targets(
        one, one.targets, [[Check("a", passes()), Check("b", passes(), once=True)], [Check("c", passes())]], print
    )
    assert [(f.node, f.check, f.outcome.passed) for f in findings] == [
        ("w1", "answers", False),
        ("w2", "answers", False),
        ("w3", "a", True),
        ("w3", "b", True),
        ("w3", "c", True),
    ]
    assert findings[0].outcome.says == "w1: cannot be reached: no route."
    assert "does not answer within 10 s" in findings[1].outcome.says
    assert findings[3].outcome.says == "good; without w1, w2"
    assert is_verified(findings) is False
    assert len(dead.asked) == len(hung.asked) == 1


def test_a_node_that_failed_is_not_asked_again():
    """No check runs on w1, whose operation failed before, nor on w2 after it became unreachable."""
    left, going = Node("w1"), Node("w2")
    one = site(left, going, Node("w3"))
    one.skipped["w1"] = "packages failed"

    def end(site, target):
        going.answer = Unreachable("w2: cannot be reached.")
        return Outcome(True, "")

    findings = verify_targets(one, one.targets, [[Check("a", end)], [Check("b", passes())]], print)
    assert [(f.node, f.check) for f in findings] == [("w2", "a"), ("w3", "a"), ("w2", "answers"), ("w3", "b")]
    assert left.asked == []


def test_an_unreachable_node_outside_of_the_selection_is_no_failure():
    """w1 is unreachable, but only w2 is verified: the check passes without w1."""
    one = site(Node("w1", Unreachable("w1: cannot be reached.")), Node("w2"))
    findings = verify_targets(one, one.targets[1:], [[Check("a", passes())]], print)
    assert [(f.node, f.outcome.passed, f.outcome.says) for f in findings] == [("w2", True, "good; without w1")]


def test_a_fact_that_two_threads_read_at_once_is_asked_once():
    node, both = Node("w1", CommandOutput(0, "5", "")), threading.Barrier(2, timeout=HANG_S)
    facts, fact = FactAnswers(node), FactQuery("five", lambda python: ["five"], int, timeout_s=1)

    def ask(_):
        both.wait()
        return facts[fact]

    assert map_targets([1, 2], ask) == [5, 5]
    assert node.asked == [["five"]]


@pytest.mark.parametrize("advice", ["run it again", "is the disk full?"])
def test_an_advice_ends_with_a_period_or_a_question_mark(capsys, advice):
    """A period is added to the advice of a failed check unless the advice ends with a question mark."""
    display.show_checks(Output(), [Finding("n1", "gpus", Outcome(False, "NVML sees no GPU.", advice))])
    said = f"n1: gpus: NVML sees no GPU. Advice: {advice}{'' if advice.endswith('?') else '.'}\n"
    assert said in capsys.readouterr().out


def test_the_advice_of_a_check_that_passed_with_a_warning_is_printed(capsys):
    display.show_checks(Output(), [Finding("n1", "network", Outcome(True, "exact; WARNING: NCCL fell back to TCP", "load it"))])
    printed = capsys.readouterr().out
    assert "n1: network: load it.\n" in printed
    assert "not verified" not in printed
