"""Workers that Slurm does not use: which are resumed, which stay drained by the person who drained them, and the messages."""

import subprocess

import msgspec
import pytest

from provision.fact import Unanswered
from provision.facts.nodes import NODES, SlurmNode, parse
from provision.facts.services import SERVICES
from provision.operation import Nothing
from provision.operations import slurm, slurm_files
from shardlab.remote.remote import CommandOutput
from tests.provision.operations.test_operations import RUNNING, site, with_files

LOW = "Low RealMemory (reported:1000 < 100.00% of configured:2000)"


def with_worker(line, *, services=RUNNING, conf=True):
    """A site whose first worker is ready, and whose second worker has the given line in the output of sinfo."""
    one = site()
    head = one.targets[0]
    for target in one.targets:
        target.facts.answers[SERVICES.name] = services
    if conf:
        with_files(head, {path: (content, 0o644, "root:root") for path, content in slurm_files.render_slurm_files(one).items()})
    head.facts.answers[NODES.name] = parse(f"w1|idle|root|none\n{line}\n")
    return one


@pytest.mark.parametrize(
    "line",
    [
        "w2|drain|slurm|Not responding",
        "w2|drain*|slurm|Node unexpectedly rebooted",
        f"w2|drain|slurm|{LOW}",
        "w2|drain|slurm|Low socket*core*thread count, Low CPUs",
        "w2|drain|root|shardlab:driver",
        "w2|drng|alice|shardlab:driver",
    ],
)
def test_a_worker_is_resumed_if_we_drained_it_or_if_the_reason_no_longer_holds(line):
    one = with_worker(line)
    resume, wait = slurm.plan_nodes(one, one.targets[0])
    assert "scontrol update nodename=w2 state=resume" in resume.command
    assert line.rpartition("|")[2] in resume.description
    assert resume.node is one.targets[0].node
    assert wait.description.startswith("wait until all workers are ready (w2: dr")


@pytest.mark.parametrize(
    ("scontrol", "sinfo", "code"),
    [
        ("true", "echo drain", 0),
        # sinfo prints two lines, because the worker is in two partitions
        ("echo 'slurm_update error: Invalid node state specified'; exit 1", "echo idle; echo idle", 0),
        ("echo 'slurm_update error: Invalid node state specified'; exit 1", "echo mix", 0),
        ("echo 'slurm_update error: Invalid node state specified'; exit 1", "echo drain", 1),
        ("echo 'slurm_update error: Unable to contact slurm controller' >&2; exit 1", "exit 1", 1),
        # the controller has just restarted and does not know the state of the worker yet
        ("echo 'slurm_update error: Invalid node state specified'; exit 1", "echo 'unk*'", 0),
        ("echo 'slurm_update error: Invalid node state specified'; exit 1", "echo 'drain*'", 1),
    ],
)
def test_a_worker_that_slurm_resumed_meanwhile_is_no_failure(tmp_path, scontrol, sinfo, code):
    for name, script in (("scontrol", scontrol), ("sinfo", sinfo)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    resume, _ = slurm.plan_nodes(one := with_worker("w2|drain|slurm|Not responding"), one.targets[0])
    done = subprocess.run(
        resume.change.argv, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert ("slurm_update error" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("w2|drain|alice|fan is loud", {}),
        ("w2|drain|root|Not responding", {}),  # root drained the worker, with a text that Slurm also uses
        ("w2|drng|alice|Low RealMemory", {}),
        ("w2|down|alice|sold", {}),
        ("w2|drain|slurm|Kill task failed", {}),  # no fact shows whether this problem of the machine is solved
        ("w2|drain|slurm|Not responding", {"services": {}}),  # slurmd does not run on the worker
        (f"w2|drain|slurm|{LOW}", {"conf": False}),  # slurm.conf does not match the worker
    ],
)
def test_a_worker_that_stays_drained_fails_with_the_reason_and_the_command(line, options):
    one = with_worker(line, **options)
    _, state, user, reason = line.split("|")
    with pytest.raises(Unanswered) as caught:
        slurm.plan_nodes(one, one.targets[0])
    assert list(caught.value.reasons_by_node) == ["w2"]
    said = caught.value.reasons_by_node["w2"]
    assert f"w2: Slurm reports the state {state}" in said
    assert reason in said
    assert ("Slurm itself" if user == "slurm" else f"the user {user}") in said
    assert said.endswith("run on head: sudo scontrol update nodename=w2 state=resume")


def test_low_memory_is_not_compared_while_another_worker_is_away():
    one = with_worker(f"w2|drain|slurm|{LOW}")
    one.skipped["w1"] = "packages failed"
    with pytest.raises(Unanswered, match="Low RealMemory"):
        slurm.plan_nodes(one, one.targets[0])


def test_a_worker_that_is_down_is_waited_for():
    one = with_worker("w2|down*|slurm|Not responding")
    (wait,) = slurm.plan_nodes(one, one.targets[0])
    assert wait.description == "wait until all workers are ready (w2: down)"


class Controller:
    """Runs commands on this machine with a stand-in for `sinfo`, and shortens the wait."""

    name = "head"

    def __init__(self, folder, line):
        sinfo = folder / "sinfo"
        sinfo.write_text(
            f"#!/bin/sh\ncase \"$*\" in *%E*) echo '{line}' ;; *) echo '{line}' | cut -d '|' -f 1,2 | tr '|' ' ' ;; esac\n"
        )
        sinfo.chmod(0o755)
        self.path = f"{folder}:/usr/bin:/bin"

    def run(self, argv, *, timeout_s):
        words = [word.replace("seq 120", "seq 1") for word in argv]
        done = subprocess.run(words, env={"PATH": self.path}, capture_output=True, text=True, check=False)
        return CommandOutput(done.returncode, done.stdout, done.stderr)


def waited(tmp_path, line):
    one = with_worker("w2|down*|slurm|Not responding")
    head = one.targets[0]
    (wait,) = slurm.plan_nodes(one, head)
    one.skipped["w1"] = "away"  # so that sinfo needs to print only one line
    (wait,) = slurm.plan_nodes(one, head)
    msgspec.structs.force_setattr(head, "node", Controller(tmp_path, line))
    wait.make(head.node)


def test_a_worker_that_does_not_get_ready_is_blamed(tmp_path):
    waited(tmp_path, "w2|idle|root|none")
    with pytest.raises(Unanswered) as caught:
        waited(tmp_path, "w2|down*|slurm|Not responding")
    (said,) = caught.value.reasons_by_node.items()
    assert said[0] == "w2"
    assert "w2: Slurm reports the state down; the reason, given by Slurm itself, is: Not responding" in said[1]


def test_a_controller_that_says_nothing_is_blamed_itself(tmp_path):
    with pytest.raises(Unanswered, match="head: Slurm does not answer") as caught:
        waited(tmp_path, "slurm_load_partitions: Unable to contact slurm controller")
    assert list(caught.value.reasons_by_node) == ["head"]


def test_reasons_of_slurm_nodes_are_cleaned_and_cut_before_printing():
    found = parse("w1|idle|root|none\nw2|drain$|alice|a|b \x1b[2Jc\n")
    assert found == {"w1": SlurmNode("idle"), "w2": SlurmNode("drain", "alice", "a|b ?[2Jc")}
    assert len(parse(f"w1|drain|x|{'y' * 5000}")["w1"].reason) == 200
    with pytest.raises(ValueError, match="Allowed: %N"):
        parse("w1 idle\n")


def test_ready_workers_need_no_change():
    one = with_worker("w2|mix-|root|none")
    assert slurm.plan_nodes(one, one.targets[0]) == Nothing("2 workers are ready")
