"""When the ranks of a run have connected, they record their world (hosts, backend, network interface). If it differs from
run.json, they do not train."""

import os
import shutil
import subprocess
import sys

import msgspec
import pytest
from support_e2e import HANG_S

from jobs.node.hang_detection import INTERVAL_SHARE, LEAST_CHECK_INTERVAL_S, MOST_CHECK_INTERVAL_S
from shardlab.files import files
from shardlab.runs.run import World

pytest_plugins = ["support_trainers"]
# A shell script that simulates two machines which are connected only by a loopback interface: it runs a rank under each of two
# host names in one new network namespace, in which every port is free. It prints the exit codes of the ranks.
TWO_HOSTS = """
ip link set lo up
for rank in 0 1; do
    RANK=$rank unshare --uts sh -c 'hostname "other-$RANK" && exec "$@"' sh "$@" &
    ranks="$ranks $!"
done
for rank in $ranks; do wait $rank; echo $?; done
"""
NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", TWO_HOSTS, "sh"]


def on_nodes(run_dir, nnodes):
    """Changes run.json so that the two ranks of the run belong to this number of nodes."""
    run = run_dir.read_run()
    files.write_json(run_dir.run_json, msgspec.structs.replace(run, world=World(nnodes, 2 // nnodes, 2)))


def met(run_dir):
    """Returns (what the ranks recorded about their world, the reasons of all ranks that failed)."""
    events = run_dir.read_events()
    return [e.data for e in events if e.event == "met"], [e.data["why"] for e in events if e.event == "failed"]


def test_a_single_process_makes_no_rendezvous(bench):
    """A run with one process records a world of size 1 without a network interface."""
    (world,), failed = met(bench.complete(steps=1))
    assert (world, failed) == ({"world_size": 1, "hosts": 1, "backend": "gloo", "interface": None}, [])


def test_ranks_on_fewer_machines_than_the_run_says_are_refused(bench):
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    on_nodes(run_dir, 2)
    code, errors = bench.finish(run_dir)
    (world,), failed = met(run_dir)
    assert code == 1
    assert world["hosts"] == 1
    assert "its ranks are on 1 machine(s), counted by host name. Allowed: 2, as run.json says" in failed[0]
    assert failed[0] in errors
    assert not list(run_dir.path.glob("steps/*"))


def two_hosts(*command, **options):
    """Runs a command on each of two simulated hosts and returns the exit codes, one per line."""
    done = subprocess.run([*NETWORK, *command], stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=False, **options)
    return done.stdout


@pytest.mark.parametrize("nnodes", [1, 2])
def test_ranks_of_two_machines_are_refused_for_one_machine_or_over_loopback(bench, nnodes):
    if not shutil.which("unshare") or two_hosts("true") != "0\n0\n":
        pytest.skip("this machine gives processes no host name and no network of their own")
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    on_nodes(run_dir, nnodes)
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment = {**bench.environment, **meeting, "GLOO_SOCKET_IFNAME": "lo"}
    assert two_hosts(sys.executable, "-m", "trainers", "run", ".", cwd=run_dir.path, env=environment) == "1\n1\n"
    (world,), failed = met(run_dir)
    assert (world["hosts"], world["interface"]) == (2, "lo")
    words = {1: "its ranks are on 2 machine(s)", 2: "its ranks connected over a loopback interface (lo). Allowed:"}
    assert len(failed) == 2
    assert all(words[nnodes] in why for why in failed)


LIMITS_S = (7.0, 100.0, 1800.0)
TIMEOUTS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
for limit_s in map(float, sys.argv[1:]):
    ranks = Ranks(Rank(), 0, limit_s)
    groups = [dist.group.WORLD, dist.new_group([0]), init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")).get_group("a")]
    print(*[group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups])
    dist.destroy_process_group()
"""


def test_timeouts_of_process_groups_exceed_the_limit_of_the_supervisor():
    """The time limit of a process group must be longer than the supervisor's limit for steps, because only the supervisor can
    say which rank hangs.

    The supervisor may end a run later than its limit: if the last rank finishes a step just before the limit, the supervisor
    counts the time from this step again, and it checks at most half a minute after the limit.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", TIMEOUTS, *map(str, LIMITS_S)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    printed = [list(map(float, line.split())) for line in done.stdout.splitlines() if line[0].isdigit()]
    for limit_s, timeouts_s in zip(LIMITS_S, printed, strict=True):
        supervisor_s = 2 * limit_s + max(LEAST_CHECK_INTERVAL_S, min(MOST_CHECK_INTERVAL_S, INTERVAL_SHARE * limit_s))
        assert len(timeouts_s) == 3
        assert min(timeouts_s) > supervisor_s
