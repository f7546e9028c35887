"""Runs on SSH nodes that share no folder: each node has its own folder in the place of the workspace, in a mount namespace."""

import json
import signal
from pathlib import Path

import pytest
from support_aside import why_not
from support_line import until
from support_ssh_nodes import SshNodes, tasks, wait_for

from jobs import frozen_source, run_queue
from jobs.hang_detection import files_of
from jobs.reconcile import own
from shardlab import source_digest
from shardlab.state import FINAL

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
# As ranks do: one rank on each node, with records that all readers understand.
RANK = """\
n=$SHARDLAB_NODE; mkdir -p steps trace samples env
echo "of rank $n" > log/rank-0000$n.log
echo '{"schema": 1, "event": "of", "writer": "rank-0000'$n'", "wall_s": 1, "host": "h"}' > events.rank-0000$n.jsonl
step() { echo '{"schema": 1, "step": '$1', "t_s": 1, "wall_s": 1, "units": 1, "step_ms": 1}' >> steps/rank-0000$n.jsonl; }
step 1; step 2
echo trace > trace/rank-0000$n.json.gz
"""
RUNS = f"{RANK}exec sleep 1000"


@pytest.fixture
def nodes(tmp_path_factory, monkeypatch):
    made = SshNodes(tmp_path_factory.mktemp("first"), monkeypatch, apart=tmp_path_factory.mktemp("disks"), count=3)
    yield made
    made.end()


def names(folder):
    return {str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file()}


def up(folder, *ranks):
    until(lambda: all(len(folder.steps(rank).records) == 2 for rank in ranks), f"{folder.run_id}: its steps", 60)


def test_each_node_has_its_part_and_the_first_node_gets_the_records(nodes):
    source = frozen_source.folder(nodes.workspace) / source_digest.source()
    frozen_source.freeze(source)
    folder = nodes.run(1, 2, RANK, source=str(source))
    assert nodes.attempt(folder, "gpu1,gpu2").wait(60) == 0
    here = names(folder)
    for number, node in enumerate(("gpu1", "gpu2")):
        part = names(nodes.part(node, folder))
        own_records = {f"steps/rank-0000{number}.jsonl", f"events.rank-0000{number}.jsonl", f"log/rank-0000{number}.log"}
        assert own_records | {"run.json", "task", f"trace/rank-0000{number}.json.gz", f"log/sampler.{node}.log"} <= part
        assert not {f"steps/rank-0000{1 - number}.jsonl", "claim/job", "events.controller.jsonl"} & part
        assert own_records <= here
        assert source_digest.source(nodes.apart / node / ".shardlab/source" / source.name) == source.name
        for name in own_records:
            assert (folder.path / name).read_bytes() == (nodes.part(node, folder).path / name).read_bytes()
    assert not [name for name in here if name.startswith(("trace", "samples"))]
    (placed,) = (event for event in folder.events() if event.event == "placed")
    assert placed.data["nodes"] == ["gpu1", "gpu2"]


def test_the_first_node_may_be_a_node_of_the_run(nodes):
    folder = nodes.run(1, 2, RANK)
    assert nodes.attempt(folder, "gpu1,gpu0").wait(60) == 0
    assert {"steps/rank-00000.jsonl", "steps/rank-00001.jsonl", "trace/rank-00001.json.gz"} <= names(folder)
    assert not nodes.part("gpu0", folder).path.exists()
    assert "steps/rank-00001.jsonl" not in names(nodes.part("gpu1", folder))


@pytest.mark.parametrize("how", ["cancelled", "timeout", "hung"])
def test_a_run_ends_as_on_nodes_with_a_shared_folder(nodes, how):
    cell = json.loads((nodes.run(9, 2, RUNS).path / "run.json").read_text())["cell"]
    more = {"cell": {**cell, "hang_limit_s": 6}} if how == "hung" else {"limit_s": 5 if how == "timeout" else None}
    folder = nodes.run(1, 2, RUNS, **more)
    supervisor = nodes.attempt(folder, "gpu1,gpu2")
    if how != "timeout":
        up(folder, 0, 1)
    if how == "cancelled":
        run_queue.cancel(nodes.workspace, [own(folder)])
    assert supervisor.wait(60) == {"cancelled": 143, "timeout": 124, "hung": 124}[how]
    assert folder.judge().state == how
    assert not tasks(folder)
    if how == "hung":
        assert "ranks 0, 1 reached step 2" in folder.judge().why


def test_a_node_that_writes_only_files_that_are_not_copied_makes_progress(nodes):
    folder = nodes.run(1, 1, "mkdir -p trace; echo trace > trace/rank-00000.json.gz")
    before = set(files_of(folder.path, ask=False))
    assert nodes.attempt(folder, "gpu2").wait(60) == 0
    changed = {Path(path).name for path, _, _ in set(files_of(folder.path, ask=False)) - before}
    assert ".progress.gpu2" in changed


def test_a_node_that_is_lost_leaves_its_records_on_the_first_node(nodes):
    folder = nodes.run(1, 2, RUNS)
    supervisor = nodes.attempt(folder, "gpu1,gpu2")
    up(folder, 0, 1)
    (task,) = (task for task in tasks(folder) if task.environ()["SHARDLAB_NODE"] == "1" and task.name() == "sleep")
    session = next(parent for parent in task.parents() if "jobs.ssh.node_task" in " ".join(parent.cmdline()))
    session.send_signal(signal.SIGKILL)
    supervisor.wait(60)
    assert folder.judge().state == "node_fail"
    assert folder.judge().why.startswith("gpu2: the connection broke")
    assert len(folder.steps(1).records) == 2


def test_a_node_that_is_away_when_the_files_are_sent_is_a_node_failure(nodes):
    nodes.break_login("gpu2", "ssh: connect to host gpu2 port 22: No route to host")
    folder = nodes.run(1, 2, RUNS)
    assert nodes.attempt(folder, "gpu1,gpu2").wait(60) != 0
    assert (folder.judge().state, folder.judge().why) == (
        "node_fail",
        "gpu2: ssh: connect to host gpu2 port 22: No route to host",
    )


def test_a_part_of_an_earlier_run_of_this_name_is_set_aside(nodes):
    folder = nodes.run(1, 1, RANK)
    part = nodes.part("gpu1", folder)
    (part.path / "steps").mkdir(parents=True)
    (part.path / "steps/rank-00000.jsonl").write_text("of another run")
    assert nodes.attempt(folder, "gpu1").wait(60) == 0
    assert len(part.steps(0).records) == 2
    (old,) = part.path.parent.glob(f".{folder.run_id}.*.old")
    assert (old / "steps/rank-00000.jsonl").read_text() == "of another run"


def test_other_packages_on_a_node_are_refused(nodes):
    folder = nodes.run(1, 1, RANK, packages=source_digest.packages())
    (nodes.apart / "gpu1/packages/other-1.0.dist-info").mkdir(parents=True)
    assert nodes.attempt(folder, "gpu1").wait(60) != 0
    assert "gpu1: its installed packages" in folder.job_log.read_text()


def test_a_second_run_waits_for_a_node_that_the_first_run_uses(nodes):
    first, second = nodes.run(1, 3, RUNS), nodes.run(2, 1, RANK)
    nodes.submit(first, second)
    up(first, 0, 1, 2)
    wait_for(second, "queued")
    assert not second.claim.exists()
    run_queue.cancel(nodes.workspace, [own(first)])
    wait_for(second, "exited")
    assert second.judge().state in FINAL
    assert len(second.steps(0).records) == 2
