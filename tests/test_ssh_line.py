"""Runs on practice nodes as on SSH hosts without Slurm: equal losses, ends on every node, and a node that is lost."""

import json
import re
import subprocess
import sys

import pytest
from support_slurm import FOREVER, MATRIX, Desk

from shardlab.rundir import RunDir

pytestmark = pytest.mark.line
SLURM = re.compile(r"^slurm: .*\n", re.MULTILINE)
# Processes of a run on a node: its ranks, and the parent of its task, which serves the SSH session.
RANKS = (
    "for p in /proc/[0-9]*; do grep -qz ^RANK= $p/environ && grep -qzF SHARDLAB_RUN={} $p/environ && echo ${{p#/proc/}}; done"
)
SESSION = "for p in $(pgrep -f jobs.ssh.node_task); do test $(readlink /proc/$p/cwd) = {} && ps -o ppid= $p; done"


@pytest.fixture
def desk(slurm, tmp_path):
    made = Desk(slurm, tmp_path)
    (tmp_path / "cluster.yaml").write_text(SLURM.sub("", slurm.file.read_text()))
    yield made
    made.run("jobs", "cancel", "--all")


def matrix(desk, steps, more):
    path = desk.path / "small.yaml"
    path.write_text(MATRIX.format(name="small", steps=steps, more=more))
    return str(path)


def losses(folder):
    return [[record.loss for record in folder.steps(rank).records] for rank in range(4)]


def test_two_nodes_without_slurm_train_as_one_machine_does(desk, tmp_path):
    axes = "axes: {strategy: [ddp], gpus: [4]}\nzip: [{launcher: [torchrun, fork], nnodes: [2, 1]}]"
    name = matrix(desk, 4, axes)
    desk.run("jobs", "submit", "--matrix", name, "--where", "nnodes == 2", "--wait")
    here = tmp_path / "here"
    here.mkdir()
    words = ["jobs", "submit", "--matrix", name, "--where", "nnodes == 1", "--wait", "--workspace", str(here)]
    subprocess.run([sys.executable, "-P", "-m", *words], check=True)
    (fetched,) = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert (fetched["complete"], fetched.get("problems", [])) == (True, [])
    (run,) = json.loads(desk.run("jobs", "status", "--json").stdout)["runs"]
    assert (run["state"], run["hosts"]) == ("completed", ["work1", "work2"])
    over_ssh, local = (RunDir(next((folder / "runs").glob("ddp-*"))) for folder in (desk.path, here))
    assert {path.stem for path in (over_ssh.path / "samples").iterdir()} == {"work1", "work2"}
    assert len(losses(local)[0]) == 4
    assert losses(over_ssh) == losses(local)


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
