"""`collect fetch --prune` removes files from the cluster or its nodes only if their copy on this machine was verified."""

import json
import os
import shutil
import subprocess

import pytest
import support_collect as support
from support_aside import why_not
from support_e2e import HANG_S
from support_fetch import Cluster, contents, tree
from support_ssh_nodes import SshNodes

from collect.cli import main
from collect.fetching import gather, progress
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.remote import remote_workspace
from shardlab.workspace import inventory
from shardlab.workspace.inventory import Inventory, InventoryNode
from shardlab.workspace.workspace import Workspace

KEPT = ("run.json", "result.json", "events.", "steps/", "env/", "job.")
TRACE = "trace/rank-00000.json.gz"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster with one completed run, which has a profiler trace."""
    made = Cluster(tmp_path, tmp_path / "desk/ws")
    support.completed(made.there, support.cell())
    (run,) = made.there.list_run_dirs()
    (run.path / "trace").mkdir()
    (run.path / TRACE).write_text("large")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(progress, "QUIET_LIMIT_S", 3600.0)
    return made


@pytest.fixture
def fetch(capsys):
    def run(workspace, *words, code=0):
        found = main(["fetch", "--json", "--workspace", str(workspace.path), *words])
        said = capsys.readouterr()
        assert found == code, said.err
        return said.err, {run["run"]: run for run in json.loads(said.out)} if said.out else None

    return run


def test_files_that_are_verified_here_are_removed_on_the_cluster(cluster, fetch, there, here):
    before = contents(there)
    freed_bytes = sum(len(content) for name, content in before.items() if not name.startswith(KEPT))
    assert freed_bytes > 0
    said, found = fetch(cluster.here, "--prune", "--yes")
    (freed,) = found[there.name]["freed"]
    assert (freed["where"], freed["bytes"], freed.get("why", "")) == ("far", freed_bytes, "")
    assert f"far: {freed['files']} files removed" in said
    assert contents(here) == before
    assert set(contents(there)) - {".pruned"} == {name for name in before if name.startswith(KEPT)}
    assert not (there / "trace").exists()
    assert (found[there.name]["state"], found[there.name]["complete"]) == ("completed", True)

    for workspace in (cluster.here, cluster.there):
        _, found = fetch(workspace)
        assert (found[there.name]["complete"], found[there.name].get("problems", [])) == (True, [])
    said, found = fetch(cluster.here, "--prune", "--yes")
    assert "There is nothing to remove." in said
    shutil.rmtree(here)
    _, found = fetch(cluster.here, code=1)
    assert "`collect fetch --prune` has removed the files of this run on the cluster" in found[there.name]["problems"][0]


@pytest.mark.parametrize("where", ["on the cluster", "here"])
def test_a_copy_with_another_checksum_keeps_the_files_on_the_cluster(cluster, fetch, there, here, where):
    """A disk fault changed a trace, but not its size and time. A fetch does not notice the fault, but `--prune` does."""
    fetch(cluster.here)
    path = (there if where == "on the cluster" else here) / TRACE
    status = path.stat()
    path.write_text("lArge")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = tree(there)
    said, found = fetch(cluster.here, "--prune", "--yes", code=1)
    (freed,) = found[there.name]["freed"]
    assert (freed.get("files", 0), freed["why"]) == (0, f"{TRACE} there is not the same as on this machine")
    assert f"far: files of {there.name} stay: {TRACE}" in said
    assert tree(there) == before


def test_running_runs_and_runs_needed_for_a_resume_are_not_pruned(cluster, fetch, there):
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    support.event(going, "started", 0)
    run = json.loads(going.run_json.read_text())
    before = contents(going.path)
    files.write_json(going.run_json, {**run, "resume": [there.name]})
    said, found = fetch(cluster.here, "--prune", "--yes", code=1)
    assert f"{going.run_id}: its files stay: it has not ended (running)." in said
    (freed,) = found[there.name]["freed"]
    assert freed["why"] == f"{going.run_id}, which has not ended, resumes from it"
    assert (there / TRACE).exists()
    files.write_json(going.run_json, run)
    fetch(cluster.here, "--prune", "--yes")
    assert not (there / TRACE).exists()
    assert contents(going.path).keys() >= before.keys()


def test_a_run_folder_in_which_a_process_works_is_not_pruned(cluster, fetch, there):
    with subprocess.Popen(["sleep", "1000"], cwd=there) as process:
        _, found = fetch(cluster.here, "--prune", "--yes", code=1)
        process.kill()
    assert found[there.name]["freed"][0]["why"] == "a process works in its folder"
    assert (there / TRACE).exists()


def test_prune_without_a_confirmation_does_not_contact_the_cluster(cluster, fetch, here):
    said, _ = fetch(cluster.here, "--prune", code=2)
    assert said == "error: --prune was not confirmed. Allowed: the option --yes, or the answer `yes` on a terminal.\n"
    assert not here.exists()


@pytest.mark.parametrize("where", ["local", "the cluster's own folder", "a copy"])
def test_the_only_copy_of_runs_is_never_pruned(cluster, fetch, there, where, tmp_path):
    workspace = cluster.there
    if where == "the cluster's own folder":
        (cluster.here.path / remote_workspace.MARK_FILE).write_text("far:/ws\n")
        workspace = cluster.here
    elif where == "a copy":
        known = remote_workspace.read_remote_workspace(cluster.here)
        original = tmp_path / "original/.shardlab"
        original.mkdir(parents=True)
        marked = {name: getattr(known, name) for name in known.__struct_fields__} | {"mark": f"far:{original.parent}\n"}
        for path in (original, cluster.here.shardlab_folder):
            files.write_json(path / "away.json", marked)
        workspace = cluster.here
    before = tree(there)
    said, _ = fetch(workspace, "--prune", "--yes", code=2)
    assert "is a copy of" in said if where == "a copy" else "are stored in this folder alone" in said
    assert tree(there) == before


RANK = """\
n=$SHARDLAB_NODE; mkdir -p steps trace
echo '{"schema": 1, "step": 1, "t_s": 1, "wall_s": 1, "units": 1, "step_ms": 1}' >> steps/rank-0000$n.jsonl
echo trace of $n > trace/rank-0000$n.json.gz
"""


@pytest.mark.parametrize(
    ("name", "cluster", "why"),
    [
        ("gpu1", "bench", "inventory.json: lists no node gpu1 with shardlab."),
        ("gpu2", "bench", "inventory.json: lists no node gpu2 with shardlab."),
        ("gpu0", "other", "inventory.json: describes the cluster bench, not other. Run first: provision CLUSTER.yaml."),
    ],
    ids=["without shardlab", "not in the inventory", "of another cluster"],
)
def test_files_are_not_collected_from_a_node_that_cannot_have_them(tmp_path, name, cluster, why):
    workspace = Workspace(tmp_path)
    listed = [InventoryNode("gpu0", "10.0.0.1", python="/opt/python"), InventoryNode("gpu1", "10.0.0.2")]
    files.make_folder(workspace.shardlab_folder)
    files.write_json(inventory.inventory_path(workspace), Inventory(1, "bench", listed))
    assert gather.find_node(workspace, "bench", "gpu0") == listed[0]
    with pytest.raises(InputError) as caught:
        gather.find_node(workspace, cluster, name)
    assert str(caught.value) == f"{workspace.shardlab_folder}/{why}"


@pytest.fixture
def nodes(tmp_path_factory, monkeypatch):
    made = SshNodes(tmp_path_factory.mktemp("first"), monkeypatch, apart=tmp_path_factory.mktemp("disks"), count=3)
    yield made
    made.end()


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_nodes_are_freed_of_the_parts_that_the_first_node_has(nodes, fetch):
    folder = nodes.run(1, 3, RANK)
    assert nodes.attempt(folder, "gpu0,gpu1,gpu2").wait(HANG_S) == 0
    fetch(nodes.workspace)
    before = contents(folder.path)
    status = (part := nodes.part("gpu2", folder).path / "trace/rank-00002.json.gz").stat()
    part.write_text("TRACE of 2\n")
    os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
    _, found = fetch(nodes.workspace, "--prune", "--yes", code=1)
    freed = {one["where"]: one for one in found[folder.run_id]["freed"]}
    assert freed["gpu1"]["files"] > 0
    assert freed["gpu2"]["why"] == "trace/rank-00002.json.gz there is not the same as on this machine"
    assert set(freed) == {"gpu1", "gpu2"}
    assert not nodes.part("gpu1", folder).path.exists()
    part.write_text("trace of 2\n")
    nodes.break_login("gpu2", "No route to host")
    _, found = fetch(nodes.workspace, "--prune", "--yes", code=1)
    assert "No route to host" in next(one for one in found[folder.run_id]["freed"] if one["where"] == "gpu2")["why"]
    nodes.mend_login("gpu2")
    fetch(nodes.workspace, "--prune", "--yes")
    assert not nodes.part("gpu2", folder).path.exists()
    assert contents(folder.path) == before
    _, found = fetch(nodes.workspace)
    assert found[folder.run_id]["complete"]
