"""Runs on practice nodes that are used as SSH hosts without Slurm: the losses are equal to those on this machine, every run
ends on all its nodes, and a lost node is handled.

The tests run once with a folder that all nodes share, and once without it.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support_long import only_in_long_form
from support_practice import WHY, clusters
from support_slurm import FOREVER, MATRIX, Desk, SlurmCluster

from shardlab.runs.rundir import RunDir

pytestmark = pytest.mark.e2e
# Shell code that prints ids of processes of a run on a node. RANKS: its ranks. SESSION: the process of sshd that serves the SSH
# session of the run's task (the process that starts the ranks on the node).
RANKS = (
    "for p in /proc/[0-9]*; do grep -qz ^RANK= $p/environ && grep -qzF SHARDLAB_RUN={} $p/environ && echo ${{p#/proc/}}; done"
)
SESSION = "for p in $(pgrep -f jobs.ssh.node_task); do test $(readlink /proc/$p/cwd) = {} && ps -o ppid= $p; done"


@pytest.fixture
def desk(slurm, tmp_path):
    made = Desk(slurm, tmp_path)
    made.leave_slurm_out()
    yield made
    made.run("jobs", "cancel", "--all")


def matrix(desk, steps, more):
    path = desk.path / "small.yaml"
    path.write_text(MATRIX.format(name="small", steps=steps, more=more))
    return str(path)


def losses(folder):
    return [[record.loss for record in folder.steps(rank).records] for rank in range(4)]


def trained_as_here(desk, nodes):
    """Trains the same cell on two nodes and on this machine, and checks that the losses are equal. Returns the run on two
    nodes, after it was fetched."""
    axes = "axes: {strategy: [ddp], gpus: [4]}\nzip: [{launcher: [torchrun, fork], nnodes: [2, 1]}]"
    name = matrix(desk, 4, axes)
    desk.run("jobs", "submit", "--matrix", name, "--where", "nnodes == 2", "--wait")
    here = desk.path / "here"
    here.mkdir()
    words = ["jobs", "submit", "--matrix", name, "--where", "nnodes == 1", "--wait", "--workspace", str(here)]
    subprocess.run([sys.executable, "-P", "-m", *words], check=True)
    (fetched,) = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert (fetched["complete"], fetched.get("problems", [])) == (True, [])
    (run,) = json.loads(desk.run("jobs", "status", "--json").stdout)["runs"]
    assert (run["state"], run["hosts"]) == ("completed", nodes)
    over_ssh, local = (RunDir(next((folder / "runs").glob("ddp-*"))) for folder in (desk.path, here))
    assert sorted(path.stem for path in (over_ssh.path / "samples").glob("*.jsonl")) == nodes
    assert len(losses(local)[0]) == 4
    assert losses(over_ssh) == losses(local)
    return over_ssh


@only_in_long_form
def test_two_nodes_without_slurm_train_as_one_machine_does(desk):
    trained_as_here(desk, ["work1", "work2"])


def test_runs_without_slurm_share_no_node_and_end_on_all_of_their_nodes(desk, slurm):
    zipped = "zip: [{gpus: [2, 2, 1], nnodes: [2, 2, 1], seed: [1, 2, 3]}]"
    desk.run("jobs", "submit", "--matrix", matrix(desk, FOREVER, f"axes: {{strategy: [ddp]}}\n{zipped}"))
    twin = desk.twin()

    def run(seed):
        return next(run for run in twin.runs() if run["cell"]["seed"] == seed)

    def process(script, node, run):
        return slurm.run(node, f"{script.format(twin.path / 'runs' / run['id'])}; true", root=True).split()

    def trains(seed):
        return run(seed)["state"] == "running" and run(seed)["step"]

    twin.until(lambda: trains(1), "the first run trains")
    assert [run(seed)["state"] for seed in (2, 3)] == ["pending"] * 2
    assert run(2)["scheduler"]["raw"] == "queued: waits for free nodes"

    slurm.run("work2", f"kill -KILL {process(RANKS, 'work2', run(1))[0]}", root=True)
    twin.until(lambda: run(1)["state"] == "failed", "a killed rank fails its run")
    assert not any(process(RANKS, node, run(1)) for node in ("work1", "work2"))

    twin.until(lambda: trains(2), "the second run trains")
    slurm.run("work2", f"kill -KILL {process(SESSION, 'work2', run(2))[0]}", root=True)
    twin.until(lambda: run(2)["state"] == "node_fail", "a node that is lost")
    assert run(2)["why"].startswith("work2: the connection broke")

    twin.until(lambda: trains(3), "the third run trains")
    ((node,),) = [run(3)["hosts"]]
    assert process(RANKS, node, run(3))
    desk.run("jobs", "cancel", "--all")
    assert [run(seed)["state"] for seed in (1, 2, 3)] == ["failed", "node_fail", "cancelled"]
    assert not any(process(RANKS, name, run(seed)) for name in ("work1", "work2") for seed in (2, 3))

    again = desk.run("jobs", "retry", "--only", "node_fail")
    assert "attempt 2 after node_fail" in again.stdout
    (folder,) = [folder for folder in twin.folders() if folder.run_id.endswith("-a2")]
    assert folder.read_run().avoid == ["work2"]


@only_in_long_form
def test_a_failed_run_without_slurm_is_retried_as_often_as_the_matrix_allows(desk, slurm):
    more = "axes: {strategy: [ddp], gpus: [2], nnodes: [2]}\nretry: {failed: 1}"
    desk.run("jobs", "submit", "--matrix", matrix(desk, FOREVER, more))
    twin = desk.twin()

    def trains(attempt):
        return any(run["step"] for run in twin.runs() if run["attempt"] == attempt)

    for attempt in (1, 2):
        twin.until(partial(trains, attempt), f"attempt {attempt} trains")
        folder = next(folder for folder in twin.folders() if folder.read_run().attempt == attempt)
        script = f"{RANKS.format(twin.path / 'runs' / folder.run_id)}; true"
        slurm.run("work2", f"kill -KILL {slurm.run('work2', script, root=True).split()[0]}", root=True)
    twin.until(lambda: twin.runs()[-1]["state"] == "failed" and twin.runs()[-1]["attempt"] == 2, "the second attempt fails")
    assert sorted(folder.read_run().attempt for folder in twin.folders()) == [1, 2]
    (last,) = [folder.read_run() for folder in twin.folders() if folder.read_run().attempt == 2]
    assert last.retried == ["failed"]


# A cluster whose nodes share no folder. The first node, `head`, trains too.
APART = """\
schema: 1
name: test-apart
provider: virtual
nodes:
  - {name: head, roles: [controller, worker]}
  - {name: work1}
lan: {subnet: 10.89.78.0/24, mbps: 1000}
gpus: {type: practice, per_node: 2}
ssh: {between_nodes: true}
"""


@pytest.fixture(scope="module")
def apart():
    if WHY is not None:
        pytest.skip(WHY)
    for made in clusters(Path("/srv") / f"shardlab-test-{os.getpid()}-apart", APART):
        yield SlurmCluster(made.folder)


@pytest.fixture
def far_desk(apart, tmp_path):
    made = Desk(apart, tmp_path)
    yield made
    made.run("jobs", "cancel", "--all")


@only_in_long_form
def test_nodes_without_a_shared_folder_train_as_one_machine_does(far_desk, apart):
    run = trained_as_here(far_desk, ["head", "work1"])
    there = far_desk.twin().path / "runs" / run.run_id
    steps = {node: apart.run(node, f"ls {there}/steps").split() for node in ("head", "work1")}
    assert len(steps["head"]) == 4  # the files of the two ranks on head, and copies of those of the two ranks on work1
    assert len(steps["work1"]) == 2
    assert "run.json" in apart.run("work1", f"ls {there}")
    assert "claim" not in apart.run("work1", f"ls {there}")
    far_desk.run("jobs", "logs", run.run_id, "--rank", str(int(steps["work1"][0][5:10])))
    far_desk.run("collect", "summarize")
    assert (far_desk.path / "report/index.html").exists()


@only_in_long_form
def test_a_run_without_a_shared_folder_that_lost_a_node_resumes(far_desk, apart):
    saves = "instruments: {checkpoints: {every_steps: 5, keep: 2}}"
    text = MATRIX.format(name="small", steps=FOREVER, more="axes: {strategy: [fsdp2], gpus: [4], nnodes: [2], seed: [1, 2]}")
    path = far_desk.path / "small.yaml"
    path.write_text(text.replace('prove: "off"', f'prove: "off"\n  {saves}'))
    far_desk.run("jobs", "submit", "--matrix", str(path))
    twin = far_desk.twin()

    def runs():
        return sorted(twin.runs(), key=lambda run: (run["cell"]["seed"], run["attempt"]))

    twin.until(lambda: runs()[0]["state"] == "running" and (runs()[0]["step"] or 0) > 5, "the first run trains")
    assert runs()[1]["scheduler"]["raw"] == "queued: waits for free nodes"
    far_desk.run("jobs", "cancel", runs()[0]["id"])
    assert runs()[0]["state"] == "cancelled"

    twin.until(lambda: (runs()[1]["step"] or 0) > 12, "the second run trains")
    apart.machine("work1").crash()
    twin.until(lambda: runs()[1]["state"] == "node_fail", "a node that crashed")
    assert runs()[1]["why"].startswith("work1: the connection broke")
    lost = runs()[1]["id"]
    fetched = {run["run"]: run for run in json.loads(far_desk.run("collect", "fetch", "--json", code=1).stdout)}
    assert fetched[lost]["parts"][0].startswith("the part of work1 is missing: ")
    assert not fetched[lost]["complete"]
    assert all(losses(RunDir(far_desk.path / "runs" / lost)))

    again = far_desk.run("jobs", "retry", "--only", "node_fail")
    assert "resumes from its checkpoint at step" in again.stdout
    assert runs()[1]["attempt"] == 2  # `jobs status` shows only the last attempt of each cell and repeat
    twin.until(lambda: runs()[1]["scheduler"]["raw"].startswith("queued: work1 does not answer"), "it waits for the node")
    apart.boot("work1")
    twin.until(lambda: runs()[1]["state"] == "running" and (runs()[1]["resumed_from_step"] or 0) >= 5, "it resumes")
    fetched = {run["run"]: run for run in json.loads(far_desk.run("collect", "fetch", "--json", "--run", lost).stdout)}
    assert fetched[lost]["complete"]
