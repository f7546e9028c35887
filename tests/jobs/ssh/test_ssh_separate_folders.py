"""Runs on SSH nodes without a shared folder. Each node runs in its own mount namespace, where the path of the workspace leads
to a folder of that node."""

import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_aside import why_not
from support_cells import CELL
from support_e2e import HANG_S, until
from support_ssh_nodes import SshNodes, tasks, wait_for

from collect.cli import main
from jobs import run_queue
from jobs.node.hang_detection import scan_files
from jobs.rendering import frozen_source
from jobs.ssh import node_folders
from jobs.status.reconcile import read_run_on_disk
from shardlab.files import source_digest
from shardlab.runs import checkpoint
from shardlab.runs.checkpoint import CheckpointFile, CheckpointManifest
from shardlab.runs.state import FINAL_STATES

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
# A shell script that does what a rank does, once on each node: it writes records that all readers accept.
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
    until(lambda: all(len(folder.steps(rank).records) == 2 for rank in ranks), f"{folder.run_id}: its steps")


def test_each_node_has_its_part_and_the_first_node_gets_the_records(nodes):
    source = frozen_source.find_source_copies_folder(nodes.workspace) / source_digest.digest_source()
    frozen_source.freeze_source(source)
    folder = nodes.run(1, 2, RANK, source=str(source))
    assert nodes.attempt(folder, "gpu1,gpu2").wait(HANG_S) == 0
    here = names(folder)
    for number, node in enumerate(("gpu1", "gpu2")):
        part = names(nodes.part(node, folder))
        own_records = {f"steps/rank-0000{number}.jsonl", f"events.rank-0000{number}.jsonl", f"log/rank-0000{number}.log"}
        assert own_records | {"run.json", "task", f"trace/rank-0000{number}.json.gz", f"log/sampler.{node}.log"} <= part
        assert not {f"steps/rank-0000{1 - number}.jsonl", "claim/job", "events.controller.jsonl"} & part
        assert own_records <= here
        assert source_digest.digest_source(nodes.apart / node / ".shardlab/source" / source.name) == source.name
        for name in own_records:
            assert (folder.path / name).read_bytes() == (nodes.part(node, folder).path / name).read_bytes()
    assert not [name for name in here if name.startswith(("trace", "samples"))]
    (placed,) = (event for event in folder.read_events() if event.event == "placed")
    assert placed.data["nodes"] == ["gpu1", "gpu2"]


def test_the_first_node_may_be_a_node_of_the_run(nodes):
    folder = nodes.run(1, 2, RANK)
    assert nodes.attempt(folder, "gpu1,gpu0").wait(HANG_S) == 0
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
        run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(folder)])
    assert supervisor.wait(HANG_S) == {"cancelled": 143, "timeout": 124, "hung": 124}[how]
    assert folder.judge().state == how
    assert not tasks(folder)
    if how == "hung":
        assert "ranks 0, 1 reached step 2" in folder.judge().why


def test_the_time_limit_also_ends_a_run_whose_files_are_still_sent(nodes):
    nodes.replace_transfers("exec sleep 1000")
    folder = nodes.run(1, 2, RUNS, limit_s=3)
    assert nodes.attempt(folder, "gpu1,gpu2").wait(HANG_S) == 124
    assert (folder.judge().state, folder.judge().why) == ("timeout", "ended at its time limit of 3 s")
    assert not tasks(folder)


def test_a_node_that_writes_only_files_that_are_not_copied_makes_progress(nodes):
    folder = nodes.run(1, 1, "mkdir -p trace; echo trace > trace/rank-00000.json.gz")
    before = set(scan_files(folder.path, opens_files=False))
    assert nodes.attempt(folder, "gpu2").wait(HANG_S) == 0
    changed = {Path(path).name for path, _, _ in set(scan_files(folder.path, opens_files=False)) - before}
    assert ".progress.gpu2" in changed


def test_a_node_that_is_lost_leaves_its_records_on_the_first_node(nodes):
    folder = nodes.run(1, 2, RUNS)
    supervisor = nodes.attempt(folder, "gpu1,gpu2")
    up(folder, 0, 1)
    (task,) = (task for task in tasks(folder) if task.environ()["SHARDLAB_NODE"] == "1" and task.name() == "sleep")
    session = next(parent for parent in task.parents() if "jobs.ssh.node_task" in " ".join(parent.cmdline()))
    session.send_signal(signal.SIGKILL)
    supervisor.wait(HANG_S)
    assert folder.judge().state == "node_fail"
    assert folder.judge().why.startswith("gpu2: the connection broke")
    assert len(folder.steps(1).records) == 2


def test_a_node_that_is_away_when_the_files_are_sent_is_a_node_failure(nodes):
    nodes.break_login("gpu2", "ssh: connect to host gpu2 port 22: No route to host")
    folder = nodes.run(1, 2, RUNS)
    assert nodes.attempt(folder, "gpu1,gpu2").wait(HANG_S) != 0
    assert (folder.judge().state, folder.judge().why) == (
        "node_fail",
        "gpu2: ssh: connect to host gpu2 port 22: No route to host",
    )


def test_a_part_of_an_earlier_run_of_this_name_is_set_aside(nodes):
    folder = nodes.run(1, 1, RANK)
    part = nodes.part("gpu1", folder)
    (part.path / "steps").mkdir(parents=True)
    (part.path / "steps/rank-00000.jsonl").write_text("of another run")
    assert nodes.attempt(folder, "gpu1").wait(HANG_S) == 0
    assert len(part.steps(0).records) == 2
    (old,) = part.path.parent.glob(f".{folder.run_id}.*.old")
    assert (old / "steps/rank-00000.jsonl").read_text() == "of another run"


@pytest.mark.parametrize(("on", "sharing"), [("gpu1,gpu2", "gpu[12] and gpu[12]"), ("gpu0,gpu1", "gpu0 and gpu1")])
def test_nodes_that_share_a_folder_that_the_cluster_file_does_not_name_are_refused(nodes, on, sharing):
    folder = nodes.run(1, 2, RANK)
    first, second = on.split(",")
    (nodes.apart / second).rmdir()
    (nodes.apart / second).symlink_to(nodes.workspace.path if first == "gpu0" else nodes.apart / first)
    old = nodes.part(first, folder).path
    old.mkdir(parents=True)
    (old / "of-an-earlier-run").write_text("")
    assert nodes.attempt(folder, on).wait(HANG_S) != 0
    assert folder.judge().state == "failed"
    assert re.search(f"the nodes {sharing} share the folder {nodes.workspace.runs}", folder.judge().why)
    assert "Set storage.shared" in folder.judge().why
    assert not list(nodes.workspace.runs.glob(".*.new"))
    assert first == "gpu0" or len(list(old.parent.glob(".*.old/of-an-earlier-run"))) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_two_nodes_that_set_the_same_earlier_folder_aside_at_one_time_are_noticed(tmp_path, moment):
    folder = tmp_path / "runs/0001"
    folder.mkdir(parents=True)
    (folder / "of-an-earlier-run").write_text("")

    def prepare(node):
        return [
            "sh",
            "-euc",
            node_folders.PREPARE_SCRIPT,
            "prepare",
            str(folder),
            "token",
            node,
            str(tmp_path / "own"),
            ".token",
        ]

    # gpu1 and gpu2 prepare the same run folder at once. A fake `mv`, which gpu2 uses to move an earlier folder aside, first
    # does something else at the moment `after` or `before`. `after`: gpu1 prepares the run folder. `before`: the earlier folder
    # is moved away, as if gpu1 had just moved it aside.
    (tmp_path / "mv").write_text(
        f"#!/bin/sh\nif mkdir {tmp_path}/once 2>/dev/null; then\n"
        + (
            f"{shlex.join(prepare('gpu1'))} > {tmp_path}/first\n"
            if moment == "after"
            else f"/bin/mv {folder} {tmp_path}/aside\n"
        )
        + 'fi\nexec /bin/mv "$@"\n'
    )
    (tmp_path / "mv").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    second = subprocess.run(prepare("gpu2"), env=path, capture_output=True, text=True, check=False)
    if moment == "after":
        assert (tmp_path / "first").read_text() == "token made\n"
        assert second.stdout == "token shared gpu1\n"
        assert (folder / ".part").read_text() == "token gpu1\n"
        assert len(list(folder.parent.glob(".*.old/of-an-earlier-run"))) == 1
        assert not list(folder.parent.glob(".*.new"))
    else:
        assert second.stdout == "token made\n"


def test_a_startup_file_that_prints_does_not_hide_which_node_is_the_first(nodes):
    nodes.greet("gpu0")
    folder = nodes.run(1, 1, RANK)
    assert nodes.attempt(folder, "gpu0").wait(HANG_S) == 0
    assert len(folder.steps(0).records) == 2


def test_a_startup_file_that_prints_disturbs_no_transfer(nodes):
    nodes.greet("gpu1")
    folder = nodes.run(1, 1, RANK)
    assert nodes.attempt(folder, "gpu1").wait(HANG_S) == 0
    assert len(folder.steps(0).records) == 2


def test_other_packages_on_a_node_are_refused(nodes):
    folder = nodes.run(1, 1, RANK, packages=source_digest.digest_installed_packages())
    (nodes.apart / "gpu1/packages/other-1.0.dist-info").mkdir(parents=True)
    assert nodes.attempt(folder, "gpu1").wait(HANG_S) != 0
    assert "gpu1: its installed packages" in folder.job_log.read_text()


def test_a_second_run_waits_for_a_node_that_the_first_run_uses(nodes):
    first, second = nodes.run(1, 3, RUNS), nodes.run(2, 1, RANK)
    nodes.submit(first, second)
    up(first, 0, 1, 2)
    wait_for(second, "queued")
    assert not second.claim.exists()
    run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(first)])
    wait_for(second, "exited")
    assert second.judge().state in FINAL_STATES
    assert len(second.steps(0).records) == 2


@pytest.fixture
def fetch(nodes, capsys):
    """Returns a function that runs `collect fetch` on the first node. The function returns the report about each run, by run
    id."""

    def run(code=0):
        assert main(["fetch", "--json", "--workspace", str(nodes.workspace.path)]) == code
        return {one["run"]: one for one in json.loads(capsys.readouterr().out)}

    return run


def ended(nodes, repeat=1, on="gpu1,gpu2"):
    folder = nodes.run(repeat, 2, f"{RANK}echo same > trace/of-both; echo $n > trace/of-$n")
    assert nodes.attempt(folder, on).wait(HANG_S) == 0
    return folder


def test_fetch_gathers_the_parts_of_all_nodes(nodes, fetch):
    folder = ended(nodes)
    found = fetch()[folder.run_id]
    assert (found["complete"], found.get("parts", []), found.get("problems", [])) == (True, [], [])
    trace = {path.name: path.read_text() for path in (folder.path / "trace").iterdir()}
    assert trace == {
        "rank-00000.json.gz": "trace\n", "rank-00001.json.gz": "trace\n", "of-both": "same\n", "of-0": "0\n", "of-1": "1\n"
    }  # fmt: skip
    for node in ("gpu1", "gpu2"):
        assert names(nodes.part(node, folder)) - {".part"} <= names(folder)
        nodes.break_login(node, "it is away")
    assert fetch()[folder.run_id]["hashed"] == 0
    assert not (nodes.workspace.runs / ".parts/gpu1").exists()


def test_a_missing_part_is_reported_and_fetched_later(nodes, fetch):
    folder = ended(nodes)
    nodes.break_login("gpu2", "ssh: connect to host gpu2 port 22: No route to host")
    found = fetch(code=1)[folder.run_id]
    assert not found["complete"]
    (sentence,) = found["parts"]
    assert sentence.startswith("the part of gpu2 is missing: ")
    assert "No route to host" in sentence
    assert (folder.path / "trace/of-0").exists()
    nodes.mend_login("gpu2")
    assert fetch()[folder.run_id]["complete"]
    assert (folder.path / "trace/of-1").exists()


def test_a_part_in_which_a_process_still_works_is_not_complete(nodes, fetch):
    folder = ended(nodes)
    mounted = 'mount --bind "$1" "$2" && cd "$3" && echo ready && exec sleep 1000'
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted, "rank", nodes.apart / "gpu2"]
    rank = subprocess.Popen([*words, nodes.workspace.path, folder.path], stdout=subprocess.PIPE, text=True)
    assert rank.stdout.readline() == "ready\n"
    sentence = "the part of gpu2 may grow: a process on the node still works in its folder"
    assert sentence in fetch(code=1)[folder.run_id]["parts"]
    rank.kill()
    rank.wait()
    rank.stdout.close()
    with nodes.part("gpu2", folder).steps_file(1).open("a") as lines:
        lines.write('{"schema": 1, "step": 3, "t_s": 1, "wall_s": 1, "units": 1, "step_ms": 1}\n')
    assert fetch()[folder.run_id]["complete"]
    assert len(folder.steps(1).records) == 3


def test_a_file_that_two_nodes_have_with_other_content_is_not_replaced(nodes, fetch):
    folder = ended(nodes)
    (nodes.part("gpu2", folder).path / "trace/of-both").write_text("other")
    (folder.path / "trace").mkdir()
    (folder.path / "trace/of-0").write_text("of the first node")
    found = fetch(code=1)[folder.run_id]
    assert found["parts"] == [
        f"trace/of-{name} of gpu{node} is not stored: the file of this name on the first node has other content"
        for node, name in ((1, "0"), (2, "both"))
    ]
    assert (folder.path / "trace/of-both").read_text() == "same\n"
    assert (folder.path / "trace/of-0").read_text() == "of the first node"


def test_a_copy_that_was_cut_is_replaced_by_the_whole_file(nodes, fetch):
    folder = ended(nodes)
    path = folder.steps_file(1)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert fetch()[folder.run_id]["complete"]
    assert path.read_bytes() == whole
    (folder.path / "events.collect.jsonl").unlink()
    (folder.path / "manifest.json").unlink()
    path.write_bytes(b"x" + whole[1:100])
    assert "steps/rank-00001.jsonl of gpu2 is not stored" in fetch(code=1)[folder.run_id]["parts"][0]


@pytest.mark.parametrize("longer", ["gpu1", "gpu2"])
def test_the_longer_of_two_logs_with_a_common_beginning_is_kept(nodes, fetch, longer):
    folder = ended(nodes)
    for node in ("gpu1", "gpu2"):
        for name in ("log/of-both.log", "samples/of-both.jsonl"):
            (nodes.part(node, folder).path / name).write_text("one\ntwo\n" if node == longer else "one\n")
    assert fetch()[folder.run_id]["complete"]
    for name in ("log/of-both.log", "samples/of-both.jsonl"):
        assert (folder.path / name).read_text() == "one\ntwo\n"


def test_files_of_the_first_node_are_not_taken_from_another_node(nodes, fetch):
    folder, hostile = (
        ended(nodes),
        {"claim/by-gpu2": "x", "job.sbatch": "x", "events.hold.x.jsonl": "x", "log/ssh.gpu7.log": "x"},
    )
    attempt = folder.events_file("attempt").read_text()
    hostile["events.attempt.jsonl"] = f"{attempt}{attempt}"  # begins like the first node's file
    for name, text in hostile.items():
        (nodes.part("gpu2", folder).path / name).parent.mkdir(exist_ok=True)
        (nodes.part("gpu2", folder).path / name).write_text(text)
    assert fetch(code=1)[folder.run_id]["parts"] == [
        f"{name} of gpu2 is not stored: only the first node writes this file" for name in sorted(hostile)
    ]
    assert folder.events_file("attempt").read_text() == attempt
    assert not names(folder) & (hostile.keys() - {"events.attempt.jsonl"})


def test_a_machine_that_is_not_the_first_node_does_not_call_the_run_complete(nodes, fetch):
    folder = ended(nodes)
    events = folder.events_file("step")
    events.write_text(events.read_text().replace(socket.gethostname(), "node-a"))
    found = fetch(code=1)[folder.run_id]
    assert not found["complete"]
    assert found["parts"] == [
        "the parts of its nodes are gathered on node-a, and this machine is another one; run `collect fetch` on node-a"
    ]
    assert not (folder.path / "trace").exists()


# The node that has trace/of-0 sends its files, and the command is killed when this file is here. The other node waits for that.
KILLING = """\
head -n 1 > REQUESTS.$$
grep -q trace/of-0 REQUESTS.$$ || { while kill -0 $PPID 2>/dev/null; do sleep 0.1; done; exit 1; }
REAL "$@" < REQUESTS.$$
until test -s RUNS/.parts/gpu1/*/trace/of-0; do sleep 0.1; done
kill -9 $PPID
"""
RECORDING = """\
head -n 1 > REQUESTS.$$
cat REQUESTS.$$ >> REQUESTS
REAL "$@" < REQUESTS.$$
"""


def test_a_fetch_that_was_killed_continues_with_what_arrived(nodes, fetch):
    folder = ended(nodes)
    requests = nodes.workspace.path / "requests"
    nodes.replace_transfers(KILLING.replace("REQUESTS", str(requests)).replace("RUNS", str(nodes.workspace.runs)))
    words = [sys.executable, "-P", "-m", "collect", "fetch", "--workspace", str(nodes.workspace.path)]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == -signal.SIGKILL
    assert not (folder.path / "trace/of-0").exists()
    nodes.replace_transfers(RECORDING.replace("REQUESTS", str(requests)))
    assert fetch()[folder.run_id]["complete"]
    assert "trace/of-1" in requests.read_text()
    assert "trace/of-0" not in requests.read_text()
    assert (folder.path / "trace/of-0").read_text() == "0\n"


CUTTING = """\
head -n 1 > REQUESTS.$$
grep -q trace/large REQUESTS.$$ || exec REAL "$@" < REQUESTS.$$
REAL "$@" < REQUESTS.$$ | { dd bs=4K count=700000 iflag=count_bytes status=none; kill -9 $$; }
"""


def test_a_fetch_over_a_cut_link_continues_within_a_file(nodes, fetch):
    folder, content = ended(nodes), os.urandom(1_000_000)
    (nodes.part("gpu1", folder).path / "trace/large").write_bytes(content)
    requests = nodes.workspace.path / "requests"
    nodes.replace_transfers(CUTTING.replace("REQUESTS", str(requests)))
    sentences = fetch(code=1)[folder.run_id]["parts"]
    assert "trace/large of gpu1 did not arrive as the node has it" in sentences[0]
    assert "the connection broke in the middle of an answer" in sentences[0]
    nodes.replace_transfers(RECORDING.replace("REQUESTS", str(requests)))
    assert fetch()[folder.run_id]["complete"]
    held = json.loads(requests.read_text())["held"][f"{folder.run_id}/trace/large"]
    assert 400_000 < held["bytes"] < 700_000
    assert (folder.path / "trace/large").read_bytes() == content


def test_a_file_that_grows_after_a_node_listed_it_arrives_as_it_was_listed(nodes, fetch):
    folder = ended(nodes)
    growing = nodes.part("gpu1", folder).path / "log/of-gpu1.log"
    growing.write_text("listed\n")
    nodes.replace_transfers(f'echo later >> {growing}\nexec REAL "$@"')
    assert fetch()[folder.run_id]["complete"]
    assert (folder.path / "log/of-gpu1.log").read_text() == "listed\n"


def test_names_of_a_node_that_lead_out_of_the_run_are_refused(nodes, fetch, tmp_path):
    folder = ended(nodes)
    (folder.path / "trace").symlink_to(tmp_path)
    sentences = fetch(code=1)[folder.run_id]["parts"]
    assert "is a symlink" in sentences[0]
    assert not list(tmp_path.iterdir())


def checkpointed(nodes):
    """Starts a run on gpu1 and gpu2, and cancels it after it has saved a checkpoint. Returns the run folder. Each node has its
    own part of the checkpoint."""
    folder = nodes.run(1, 2, RUNS.replace("exec", f"{SAVE}exec"))
    supervisor = nodes.attempt(folder, "gpu1,gpu2")
    until(lambda: checkpoint.list_checkpoints(folder.path), "the manifest of the checkpoint")
    other_part = nodes.part("gpu2", folder).path / "checkpoints/step-00000002/rank-00001.bin"
    until(lambda: other_part.exists() and other_part.stat().st_size == 5, "the part of the other node")
    run_queue.QueueScheduler().cancel(nodes.workspace, [read_run_on_disk(folder)])
    supervisor.wait(HANG_S)
    return folder


SAVE = """\
mkdir -p checkpoints/step-00000002; echo of $n > checkpoints/step-00000002/rank-0000$n.bin
test $n = 1 || cp "$MANIFEST" checkpoints/step-00000002/manifest.json
"""


@pytest.fixture
def manifest_file(tmp_path, monkeypatch):
    content = CheckpointManifest(
        schema=1, step=2, world=2, layout="sharded", strategy="ddp", tp=1, cell_hash=CELL.hash(), train_time_s=1.0, numbers={},
        files=[CheckpointFile(f"rank-0000{n}.bin", 5, hashlib.sha256(f"of {n}\n".encode()).hexdigest()) for n in (0, 1)],
    ).add_seal()  # fmt: skip
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(content))
    monkeypatch.setenv("MANIFEST", str(tmp_path / "manifest.json"))


def test_a_retry_gets_the_checkpoint_of_all_nodes_on_other_nodes(nodes, manifest_file):
    old = checkpointed(nodes)
    assert not (old.path / "checkpoints/step-00000002/rank-00000.bin").exists()
    again = nodes.run(2, 2, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu2,gpu0").wait(HANG_S) == 0
    for part in (nodes.part("gpu2", old), old):
        assert {path.name for path in (part.path / "checkpoints/step-00000002").iterdir()} == {
            "manifest.json", "rank-00000.bin", "rank-00001.bin"
        }  # fmt: skip
        assert len(part.steps(0).records) == len(part.steps(1).records) == 2


@pytest.mark.parametrize("kept", [0, 1])
def test_a_retry_gets_step_records_that_were_not_copied_before_the_connection_broke(nodes, manifest_file, kept):
    old = checkpointed(nodes)
    lines = old.steps_file(1).read_text().splitlines(keepends=True)
    # gpu1 has a copy of the records too, as it has after an earlier attempt to resume
    for part in (old, nodes.part("gpu1", old)):
        part.steps_file(1).write_text("".join(lines[:kept]))
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu1").wait(HANG_S) == 0
    for part in (old, nodes.part("gpu1", old)):
        assert part.steps_file(1).read_text() == "".join(lines)
    assert not (again.path / ".resume").exists()


def test_a_retry_replaces_no_records_that_a_node_wrote_itself(nodes, manifest_file):
    old = checkpointed(nodes)
    with nodes.part("gpu2", old).steps_file(1).open("a") as lines:
        lines.write("more of the node\n")
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu2").wait(HANG_S) == 0
    assert nodes.part("gpu2", old).steps_file(1).read_text().endswith("more of the node\n")
    assert len(nodes.part("gpu2", old).steps(1).records) == 2


def test_a_retry_without_the_step_records_before_the_checkpoint_says_why(nodes, manifest_file):
    old = checkpointed(nodes)
    for part in (old, nodes.part("gpu2", old)):
        part.steps_file(1).write_text("")
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu1").wait(HANG_S) != 0
    assert "the step records of 1 of its 2 ranks end before it" in again.judge().why


def test_a_retry_follows_no_symlink_of_a_node(nodes, manifest_file, tmp_path):
    old = checkpointed(nodes)
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/rank-00009.jsonl").write_text("of the first node")
    for name in ("steps", "checkpoints/step-00000002/rank-00001.bin"):
        path = nodes.part("gpu2", old).path / name
        path.rename(path.with_name("away"))
        path.symlink_to(tmp_path / path.name)
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu1").wait(HANG_S) != 0
    assert "1 of its 2 files are missing or damaged" in again.judge().why
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["rank-00009.jsonl"]
    assert not old.steps_file(9).exists()


def test_a_retry_without_a_part_of_the_checkpoint_says_why(nodes, manifest_file):
    old = checkpointed(nodes)
    nodes.break_login("gpu2", "ssh: connect to host gpu2 port 22: No route to host")
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu1").wait(HANG_S) != 0
    assert again.judge().state == "failed"
    why = again.judge().why
    assert why.startswith(
        f"cannot resume from the checkpoint at step 2 of {old.run_id}: 1 of its 2 files are missing or damaged (gpu2: "
    )
    assert "No route to host" in why


def damage_a_part(nodes, old):
    (nodes.part("gpu2", old).path / "checkpoints/step-00000002/rank-00001.bin").write_text("of 9\n")


def damage_the_manifest(_nodes, old):
    (old.path / "checkpoints/step-00000002/manifest.json").write_text("{}")


def remove_the_manifest(_nodes, old):
    (old.path / "checkpoints/step-00000002/manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_a_part, "1 of its 2 files are missing or damaged"),
        (damage_the_manifest, "its manifest is damaged"),
        (remove_the_manifest, "its manifest cannot be read"),
    ],
)
def test_a_retry_without_a_usable_checkpoint_fails_with_a_sentence(nodes, manifest_file, damage, why):
    old = checkpointed(nodes)
    damage(nodes, old)
    again = nodes.run(2, 1, "true", resume=[old.run_id])
    assert nodes.attempt(again, "gpu1").wait(HANG_S) != 0
    assert again.judge().state == "failed"
    assert again.judge().why.startswith(f"cannot resume from {old.run_id}: ")
    assert why in again.judge().why
    assert not tasks(again)
    assert not (nodes.part("gpu1", again).path).exists()


def test_a_checkpoint_that_a_node_removed_is_removed_on_the_first_node(nodes, manifest_file):
    folder = nodes.run(1, 1, f"{RANK}{SAVE}until test -e /proc/self/cwd/go; do sleep 0.1; done; rm -r checkpoints/*")
    supervisor = nodes.attempt(folder, "gpu1")
    until(lambda: checkpoint.list_checkpoints(folder.path), "the manifest of the checkpoint")
    (nodes.part("gpu1", folder).path / "go").write_text("")
    assert supervisor.wait(HANG_S) == 0
    assert not checkpoint.list_checkpoints(folder.path)
