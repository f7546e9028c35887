"""Ranks on nodes that share no folder: each node has its own part of the run's files, including checkpoints."""

import shutil
import socket
import subprocess
import sys

import msgspec
import pytest
from support_aside import why_not
from support_e2e import HANG_S

from shardlab.files import files
from shardlab.matrix.cell import CheckpointSettings, Instruments
from shardlab.runs import checkpoint
from shardlab.runs.rundir import RunDir

pytest_plugins = ["support_trainers"]
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
MOUNTED = 'mount --bind "$1" "$2" && cd "$3" && shift 3 && exec "$@"'
KEYS = {"strategy": "ddp", "gpus": 2, "steps": 12, "prove": "auto"}


@pytest.fixture(scope="module")
def trained(bench, tmp_path_factory):
    """Trains a run on two nodes, once for all tests. Returns (a folder with the disks of the nodes, the id of the run, the
    losses of each rank)."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("ws", "disk0", "disk1"):
        (folder / name).mkdir()
    disks = [folder / "disk0", folder / "disk1"]
    parts = made(bench, disks)
    return folder, parts[0].run_id, train(bench, disks, parts)


@pytest.fixture
def disks(trained, tmp_path):
    """The folders that stand for the disks of two nodes, which have trained a run. Each node sees its own disk under the same
    path, `ws`."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    return [tmp_path / "disk0", tmp_path / "disk1"]


def made(bench, disks, *resume):
    """Makes the folder of a run on both disks and returns both folders. resume: ids of earlier runs from which the run may
    resume."""
    every_4 = Instruments(checkpoints=CheckpointSettings(every_steps=4, keep=2))
    made = bench.run_dir(instruments=every_4, **KEYS)
    proofs = str(disks[0].parent / "ws/proofs")
    run = msgspec.structs.replace(made.read_run(), separate_folders=True, proofs_path=proofs, resume=list(resume))
    parts = [RunDir(disk / "runs" / run.run_id) for disk in disks]
    for part in parts:
        files.make_folder(part.path)
        files.write_json(part.run_json, run)
    return parts


def train(bench, disks, parts, code=0):
    """Trains the run with one rank on each node, and checks the exit code of each rank."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    seen = disks[0].parent / "ws"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNTED, "node"]
    ranks = [
        subprocess.Popen(
            [*command, disk, seen, seen / "runs" / part.run_id, sys.executable, "-m", "trainers", "run", "."],
            env={**bench.environment, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, (disk, part) in enumerate(zip(disks, parts, strict=True))
    ]
    for rank, process in enumerate(ranks):
        assert process.wait(HANG_S) == code, parts[rank].rank_log(rank).read_text()
    return [[record.loss for record in part.steps(rank).records] for rank, part in enumerate(parts)]


def test_each_node_has_its_part_of_a_checkpoint_and_a_run_resumes_from_all_parts(bench, trained, disks):
    _, run_id, losses = trained
    first = [RunDir(disk / "runs" / run_id) for disk in disks]
    assert len(losses[1]) == 12
    for rank, part in enumerate(first):
        assert [path.name for path in checkpoint.list_checkpoints(part.path)] == ["step-00000012", "step-00000008"]
        names = {path.name for path in (part.path / "checkpoints/step-00000008").iterdir()}
        assert names == {f"rank-{rank:05d}.bin"} | ({"manifest.json", "index.json"} if rank == 0 else set())
    assert not list((disks[1]).glob("proofs/*"))
    second = made(bench, disks, run_id)
    for part in first:
        shutil.rmtree(checkpoint.make_checkpoint_path(part.path, 12))
    for part, other in (first, first[::-1]):
        for folder in ("checkpoints", "steps"):
            shutil.copytree(other.path / folder, part.path / folder, dirs_exist_ok=True)
    assert train(bench, disks, second) == losses
    assert [event.data["step"] for event in second[0].read_events() if event.event == "resumed"] == [8]
    assert second[1].steps_file(1).read_text().splitlines()[:8] == first[1].steps_file(1).read_text().splitlines()[:8]


def test_a_run_does_not_begin_anew_if_a_part_of_its_checkpoint_is_on_no_node(bench, trained, disks):
    run_id = trained[1]
    second = made(bench, disks, run_id)
    assert train(bench, disks, second, code=1) == [[], []]
    assert [event for event in second[1].read_events() if event.event == "checkpoint_passed_over"]
    for part in second:
        (failed,) = (event for event in part.read_events() if event.event == "failed")
        assert failed.data["why"].startswith(f"no checkpoint of {run_id} can be used on all nodes")
