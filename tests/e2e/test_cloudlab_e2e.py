"""From the manifest of an experiment to a report, on practice nodes with a control network and an experiment network."""

import os
from datetime import datetime
from pathlib import Path

import pytest
from support_experiment import CONTROL, EXPERIMENT, NODES, PARTITION, experiments
from support_practice import WHY
from support_slurm import MATRIX

from provision.practice.base import PRACTICE_USER
from shardlab.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
STEPS = 100
CONTROLLED = 0.02  # the largest part of a run's data that the control network may carry, as in the check `network`


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    # not below /tmp, because the user of the nodes has no access there
    folder = Path("/srv") / f"shardlab-test-{os.getpid()}-cloudlab"
    yield from experiments(folder, tmp_path_factory.mktemp("experiment"))


def test_the_nodes_are_verified_over_the_experiment_network(experiment):
    outcomes = {(one["node"], one["check"]): one for one in experiment.verified["checks"]}
    assert f"all-reduce of 2 nodes over {EXPERIMENT} is exact" in outcomes[NODES[0], "network"]["says"]
    for name in NODES:
        control, address = experiment.hosts[name], experiment.addresses[name]
        said = outcomes[name, "experiment_network"]
        assert said["passed"] is True
        assert said["says"].startswith(f"{address} is on {EXPERIMENT} (")
        assert said["says"].endswith(f"and the control address {control} on {CONTROL}")
        assert experiment.practice.run(name, f"getent hosts {name}").split() == [address, name]
        mounted = experiment.practice.run(name, "findmnt --noheadings --output SOURCE,FSTYPE /mydata")
        assert mounted.split() == [PARTITION, "ext4"]
    again = experiment.json("provision")
    assert (again["changes"], again["verified"]) == (0, True)


@pytest.fixture(scope="module")
def sent_by_a_run(experiment):
    """How many bytes each node sent while a run trained on both nodes: {interface: {name of the node: bytes}}."""
    axes = "axes: {strategy: [ddp], gpus: [2], nnodes: [2], launcher: [torchrun]}"
    (experiment.path / "small.yaml").write_text(MATRIX.format(name="small", steps=STEPS, more=axes))
    matrix = str(experiment.path / "small.yaml")
    assert "the lease ends" in experiment.run("jobs", "plan", "--matrix", matrix).stdout
    before = {interface: experiment.sent_bytes(interface) for interface in (CONTROL, EXPERIMENT)}
    experiment.run("jobs", "submit", "--matrix", matrix, "--wait")
    after = {interface: experiment.sent_bytes(interface) for interface in (CONTROL, EXPERIMENT)}
    return {interface: {name: after[interface][name] - before[interface][name] for name in NODES} for interface in before}


def test_a_run_trains_over_the_experiment_network_only_and_gets_a_report(experiment, sent_by_a_run):
    assert datetime.fromisoformat(experiment.verified["lease"]["expires"]) == experiment.expires
    (run,) = experiment.json("jobs", "status")["runs"]
    assert (run["state"], run["hosts"]) == ("completed", list(NODES))
    (fetched,) = experiment.json("collect", "fetch")
    assert (fetched["complete"], fetched.get("problems", [])) == (True, [])
    (folder,) = [RunDir(path.parent) for path in (experiment.path / "runs").glob("*/result.json")]
    result = folder.read_result()
    assert result is not None
    assert result.parameters is not None
    trained = result.parameters * 4 * STEPS  # the bytes that each of two ranks sends in a ring all-reduce of fp32 gradients
    for name in NODES:
        assert sent_by_a_run[EXPERIMENT][name] > trained
        assert sent_by_a_run[CONTROL][name] < CONTROLLED * trained
    experiment.run("collect", "summarize")
    assert (experiment.path / "report/index.html").exists()


@pytest.mark.usefixtures("sent_by_a_run")
def test_only_the_proofs_of_trust_are_in_the_home_folders(experiment):
    """Runs must write nothing into home folders, which at CloudLab are on NFS over the control network.

    `provision` needs the files that prove which workspaces are the user's own.
    """
    skeleton = {".bashrc", ".profile", ".bash_logout"}  # files that Debian puts into a new home folder
    left = {}
    for name in NODES:
        listed = experiment.practice.run(name, f"find /home/{PRACTICE_USER} -type f -printf '%s %P\\n'").splitlines()
        sizes = {path: int(size) for size, path in (line.split(" ", 1) for line in listed)}
        left[name] = {path: size for path, size in sizes.items() if path not in skeleton | {".ssh/authorized_keys"}}
    # commands about runs are executed on the first node, which is the controller
    assert {str(Path(path).parent) for path in left[NODES[0]]} == {".local/state/shardlab/workspaces"}
    assert left[NODES[1]] == {}


def test_ranks_that_would_meet_on_the_control_network_are_noticed(experiment):
    """The cluster file names the addresses of the control network by mistake, and two checks fail."""
    roles = ["controller, worker", "worker"]
    entries = ", ".join(
        f"{{name: {name}, host: {host}, address: {host}, control: {host}, roles: [{own}]}}"
        for (name, host), own in zip(experiment.hosts.items(), roles, strict=True)
    )
    wrong = experiment.path / "wrong.yaml"
    wrong.write_text(f"{(experiment.path / 'cluster.yaml').read_text()}nodes: [{entries}]\n")
    said = experiment.json("provision", str(wrong), "verify", code=1)
    failed = {one["check"]: one["says"] for one in said["checks"] if one["passed"] is False}
    assert failed["network"].startswith("the control network, which is only for logins, carried data of the all-reduce: gpu0")
    assert "is its address on the control network" in failed["experiment_network"]
