"""Ranks that met say in which world; in another one than run.json's they train nothing."""

import os
import shutil
import socket
import subprocess
import sys

import msgspec
import pytest

from shardlab import files
from shardlab.run import World

pytest_plugins = ["support_trainers"]
# A host of another name in the same network: what two machines are that have the loopback for their way to each other.
OTHER_HOST = ["unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname "other-$RANK" && exec "$@"', "sh"]


def on_nodes(run_dir, nnodes):
    """Have run.json say that the run's ranks are on so many nodes."""
    run = run_dir.read_run()
    files.write_json(run_dir.run_json, msgspec.structs.replace(run, world=World(nnodes, 2 // nnodes, 2)))


def met(run_dir):
    """What the ranks said of their world, and why each of them that failed did."""
    events = run_dir.events()
    return [e.data for e in events if e.event == "met"], [e.data["why"] for e in events if e.event == "failed"]


def test_one_process_meets_nobody(bench):
    (world,), failed = met(bench.complete(steps=1))
    assert (world, failed) == ({"world_size": 1, "hosts": 1, "backend": "gloo", "interface": None}, [])


def test_ranks_on_fewer_machines_than_the_run_says_are_refused(bench):
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    on_nodes(run_dir, 2)
    code, errors = bench.finish(run_dir)
    (world,), failed = met(run_dir)
    assert code == 1
    assert world["hosts"] == 1
    assert "its ranks met on 1 machine(s), told apart by their host names. Allowed: 2, as run.json says" in failed[0]
    assert failed[0] in errors
    assert not list(run_dir.path.glob("steps/*"))


@pytest.mark.parametrize("nnodes", [1, 2])
def test_ranks_of_two_machines_are_refused_for_one_and_where_they_met_over_a_loopback(bench, nnodes):
    may = {**os.environ, "RANK": "0"}
    if (
        not shutil.which("unshare")
        or subprocess.run([*OTHER_HOST, "true"], env=may, capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine gives processes no host name of their own")
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    on_nodes(run_dir, nnodes)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    command = [*OTHER_HOST, sys.executable, "-m", "trainers", "run", "."]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=run_dir.path,
            env={**os.environ, **bench.environment, **meeting, "RANK": rank, "LOCAL_RANK": "0"},
        )
        for rank in ("0", "1")
    ]
    assert [rank.wait(120) for rank in ranks] == [1, 1]
    (world,), failed = met(run_dir)
    assert (world["hosts"], world["interface"]) == (2, "lo")
    words = {1: "its ranks met on 2 machine(s)", 2: "its ranks met over a loopback interface (lo). Allowed: one that leads to"}
    assert len(failed) == 2
    assert all(words[nnodes] in why for why in failed)


def test_no_group_gives_up_before_the_supervisor_does():
    code = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainers.ranks import Place, Ranks
Ranks(Place(), 0, 100.0)
groups = [dist.group.WORLD, dist.new_group([0]), init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")).get_group("a")]
print([group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups])
"""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split("\n")[0] == "[260.0, 260.0, 260.0]"
