"""Tests of the scheduler `ssh`: on which nodes it starts runs, and how each run ends. All nodes of these tests are this
machine."""

import json
import signal
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from support_e2e import HANG_S, until
from support_golden import HOSTILE, run_of, same_as_golden
from support_ssh_nodes import SshNodes, tasks, wait_for
from support_trust import make_own

from jobs import on_controller, run_queue
from jobs.cli import main
from jobs.planning import plan
from jobs.rendering import render
from jobs.schedulers import ssh
from jobs.status.reconcile import read_run_on_disk
from jobs.submission import submit
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
RUNS = "echo up > up.$SHARDLAB_NODE; exec sleep 1000"
FILE = """\
schema: 1
name: far
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1}, {name: gpu1, host: 10.9.9.2}]
storage: {shared: SHARED}
gpus: {per_node: 2}
ssh: {between_nodes: true}
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    made = SshNodes(tmp_path, monkeypatch)
    yield made
    made.end()


def exited(folder):
    (event,) = (event for event in folder.read_events() if event.event == "exited")
    return event.data["code"], event.data["reason"], event.data["why"]


def up(folder, count):
    until(lambda: len(list(folder.path.glob("up.*"))) == count, f"{folder.run_id}: {count} tasks")


def test_each_node_gets_its_task_with_its_environment(nodes, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SSH_CONNECTION", "of this login")
    folder = nodes.run(1, 2, "env > environment.$SHARDLAB_NODE")
    assert nodes.attempt(folder, "gpu1,gpu0").wait(HANG_S) == 0
    seen = [
        dict(line.split("=", 1) for line in (folder.path / f"environment.{n}").read_text().splitlines() if "=" in line)
        for n in "01"
    ]
    for number, variables in enumerate(seen):
        assert variables["SHARDLAB_NODE"] == str(number)
        assert variables["SHARDLAB_NODES"] == f"{nodes.hosts['gpu1']},{nodes.hosts['gpu0']}"
        assert variables["SHARDLAB_RENDEZVOUS"].startswith(f"{nodes.hosts['gpu1']}:")
        assert variables["SHARDLAB_IS_FIRST"] == ("false" if number else "true")
        assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert variables["OF_SCRIPT"] == "yes"
        assert "SSH_CONNECTION" not in variables
    assert len({variables["SHARDLAB_RENDEZVOUS"] for variables in seen}) == 1
    assert len({variables["SHARDLAB_RENDEZVOUS_ID"] for variables in seen}) == 1
    assert exited(folder) == (0, None, "")


def test_a_task_that_fails_ends_the_others(nodes):
    folder = nodes.run(1, 2, "test $SHARDLAB_NODE = 1 && exit 3; exec sleep 1000")
    assert nodes.attempt(folder, "gpu0,gpu1").wait(HANG_S) == 3
    assert exited(folder)[:2] == (3, None)
    until(lambda: not tasks(folder), "the tasks have ended")


def test_a_node_whose_connection_breaks_is_a_node_failure_and_is_named(nodes):
    folder = nodes.run(1, 2, RUNS)
    supervisor = nodes.attempt(folder, "gpu0,gpu1")
    up(folder, 2)
    (task,) = (task for task in tasks(folder) if task.environ()["SHARDLAB_NODE"] == "1" and task.name() == "sleep")
    sessions = [parent for parent in task.parents() if "jobs.ssh.node_task" in " ".join(parent.cmdline())]
    sessions[0].send_signal(signal.SIGKILL)  # this process also stands in for ssh, so killing it breaks the connection
    supervisor.wait(HANG_S)
    _, reason, why = exited(folder)
    assert (reason, folder.judge().state) == ("node_fail", "node_fail")
    assert why.startswith("gpu1: the connection broke")
    assert submit.find_lost_nodes(folder, ["head", "gpu0", "gpu1"]) == ["gpu1"]
    until(lambda: not tasks(folder), "the tasks have ended")


def test_tasks_end_when_their_supervisor_is_killed(nodes):
    folder = nodes.run(1, 2, RUNS)
    supervisor = nodes.attempt(folder, "gpu0,gpu1")
    up(folder, 2)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not tasks(folder), "the tasks have ended")


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_all_tasks_end_before_the_end_is_recorded(nodes, how):
    folder = nodes.run(1, 2, RUNS, limit_s=6 if how == "timeout" else None)
    supervisor = nodes.attempt(folder, "gpu0,gpu1")
    up(folder, 2)
    if how == "cancelled":
        run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(folder)])
    assert supervisor.wait(HANG_S) == {"cancelled": 143, "timeout": 124}[how]
    assert (exited(folder)[1], folder.judge().state) == (how, how)
    assert not tasks(folder)


def test_two_runs_share_no_node_and_start_in_order(nodes):
    both = "until test $(ls ../*/began.* | wc -l) -ge 2; do sleep 0.05; done"  # the first two runs wait for each other
    # the time is taken before its file exists, for which the other run waits
    begin = f"now=$(date +%s.%N); echo $now > began.$SHARDLAB_RENDEZVOUS; {both}; date +%s.%N > ended.$SHARDLAB_RENDEZVOUS"
    folders = [nodes.run(repeat, nnodes, begin) for repeat, nnodes in ((1, 1), (2, 1), (3, 2))]
    nodes.submit(*folders)
    for folder in folders:
        wait_for(folder, "exited")
    spans = {}
    for folder in folders:
        began = {path.name.split(".", 1)[1]: float(path.read_text()) for path in folder.path.glob("began.*")}
        ended = {path.name.split(".", 1)[1]: float(path.read_text()) for path in folder.path.glob("ended.*")}
        spans[folder.run_id] = (min(began.values()), max(ended.values()), next(iter(began)).rpartition(":")[0])
    first, second, third = (spans[folder.run_id] for folder in folders)
    assert {first[2], second[2]} == set(nodes.hosts.values())
    assert max(first[0], second[0]) < min(first[1], second[1])  # the first two runs ran at the same time, each on its own node
    assert third[0] > max(first[1], second[1])
    observed = ssh.SCHEDULER.observe(nodes.workspace, [read_run_on_disk(folder) for folder in folders])
    assert [seen.scheduler_words for seen in observed] == ["ended"] * 3


def test_a_run_of_another_workspace_waits_for_the_node(nodes, tmp_path, monkeypatch):
    at_work, other = nodes.run(1, 2, RUNS), SshNodes(tmp_path / "other", monkeypatch)
    waits = other.run(2, 1, "true")
    nodes.submit(at_work)
    up(at_work, 2)
    other.submit(waits)
    wait_for(waits, "queued")
    assert not waits.claim.exists()
    run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(at_work)])
    wait_for(waits, "exited")
    other.end()


def test_a_run_waits_for_a_node_that_does_not_answer_and_starts_when_it_does(nodes):
    nodes.break_login("gpu0", "ssh: connect to host gpu0 port 22: No route to host")
    single, double = nodes.run(1, 1, "echo $SHARDLAB_NODES > nodes"), nodes.run(2, 2, "true")
    nodes.submit(single, double)
    wait_for(single, "exited")
    assert (single.path / "nodes").read_text().strip() == nodes.hosts["gpu1"]
    wait_for(double, "queued")
    (seen,) = ssh.SCHEDULER.observe(nodes.workspace, [read_run_on_disk(double)])
    assert seen.verdict.state == "pending"
    assert seen.scheduler_words.startswith("queued: gpu0 does not answer (ssh: connect to host gpu0 port 22: No route to host")
    nodes.mend_login("gpu0")
    wait_for(double, "exited")
    assert exited(double)[0] == 0


def test_nodes_that_failed_under_an_earlier_attempt_are_avoided(nodes):
    folder = nodes.run(1, 1, "echo $SHARDLAB_NODES > nodes", avoid=["gpu0"])
    nodes.submit(folder)
    wait_for(folder, "exited")
    assert (folder.path / "nodes").read_text().strip() == nodes.hosts["gpu1"]


def test_a_run_that_needs_more_nodes_than_there_are_fails_and_does_not_wait(nodes):
    folder = nodes.run(1, 3, "true")
    nodes.submit(folder)
    wait_for(folder, "exited")
    assert exited(folder)[1:] == ("failed", "the run needs 3 nodes, and the inventory lists 2 nodes with the role worker")


def test_a_login_that_is_refused_names_the_key_of_the_cluster_file(nodes):
    nodes.break_login("gpu1", "practice@10.9.9.2: Permission denied (publickey).")
    folder = nodes.run(1, 2, RUNS)
    assert nodes.attempt(folder, "gpu0,gpu1").wait(HANG_S) != 0
    assert "ssh.between_nodes: true" in folder.judge().why
    assert folder.judge().state == "failed"


def test_a_killed_runner_does_not_free_the_nodes_of_its_runs(nodes):
    at_work, waits = nodes.run(1, 2, RUNS), nodes.run(2, 1, "true")
    queue = nodes.submit(at_work, waits)
    up(at_work, 2)
    pid = json.loads((nodes.workspace.shardlab_folder / "ssh/runner.json").read_text())["pid"]
    psutil.Process(pid).kill()
    until(lambda: not queue.is_runner_alive(), "the runner is gone")
    nodes.start_runner()
    wait_for(waits, "queued")
    assert not waits.claim.exists()
    run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(at_work)])
    wait_for(waits, "exited")
    assert (at_work.judge().state, exited(waits)[0]) == ("cancelled", 0)


@pytest.fixture
def workspace(tmp_path):
    made = make_own(tmp_path / "w")
    (made.path / "cluster.yaml").write_text(FILE.replace("SHARED", str(tmp_path)))
    return made


def test_the_script_of_a_run_over_ssh_is_the_golden_text(monkeypatch, workspace):
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")
    where = cluster.load_cluster(workspace.path / "cluster.yaml")
    source = render.make_render_context("m", where, workspace)
    assert source.scheduler == "ssh"
    run = msgspec.structs.replace(run_of("torchrun"), scheduler="ssh")
    same_as_golden("ssh/torchrun.sh", render.render_script(run, Path(HOSTILE), where, None))


def test_a_cell_takes_the_fewest_nodes_that_hold_its_gpus(workspace, capsys):
    (workspace.path / "small.yaml").write_text(
        "schema: 1\nname: small\ndefaults: {workload: vgg16-tiny, strategy: ddp, steps: 3, global_batch_size: 24}\n"
        "axes: {gpus: [2, 4, 6], launcher: [torchrun]}\n"
    )
    where = cluster.load_cluster(workspace.path / "cluster.yaml")
    planned = plan.plan_matrix(workspace, str(workspace.path / "small.yaml"), where, where=None, repeats=None)
    assert [cell.nnodes for cell in planned.cells] == [1, 2, 3]
    assert [misfit.why for misfit in planned.misfits] == ["needs 3 nodes, the cluster has 2."]


def test_a_launcher_that_needs_slurm_is_refused(workspace, capsys):
    (workspace.path / "small.yaml").write_text(
        "schema: 1\nname: small\ndefaults: {workload: vgg16-tiny, strategy: ddp, steps: 3, global_batch_size: 24}\n"
        "axes: {gpus: [2], launcher: [submitit]}\n"
    )
    planned = plan.plan_matrix(
        workspace,
        str(workspace.path / "small.yaml"),
        cluster.load_cluster(workspace.path / "cluster.yaml"),
        where=None,
        repeats=None,
    )
    assert "starts its ranks by Slurm, which the cluster does not have. Allowed: deepspeed" in planned.misfits[0].why


@pytest.mark.parametrize("shared", ["", "storage: {shared: SHARED}\n"])
def test_a_cluster_file_without_logins_between_nodes_is_refused(shared, tmp_path):
    text = FILE.replace("ssh: {between_nodes: true}\n", "").replace("storage: {shared: SHARED}\n", shared)
    (tmp_path / "cluster.yaml").write_text(text.replace("SHARED", str(tmp_path)))
    with pytest.raises(InputError, match=r"ssh\.between_nodes: true"):
        on_controller.must_suit_workspace(cluster.load_cluster(tmp_path / "cluster.yaml"), Workspace(tmp_path))


def test_options_of_slurm_are_refused(workspace, monkeypatch, capsys):
    monkeypatch.setattr(on_controller, "starts_runs_here", lambda _where: True)
    words = ["submit", "--matrix", "quickstart", "--pack", "--workspace", str(workspace.path), "--where", "gpus == 1"]
    assert main(words) == 2
    assert "--pack: only for Slurm, and the cluster far has no `slurm`" in capsys.readouterr().err
