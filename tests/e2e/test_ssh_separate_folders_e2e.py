"""Runs from the submission to the report on two nodes, each with its own network, host name and disk. This machine is the first
node of the cluster and does not train.

The two nodes are namespaces of this machine. A stand-in for `ssh` runs the command of a login in the namespaces of the node.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support_aside import why_not
from support_e2e import HANG_S, until
from support_slurm import FOREVER, MATRIX
from support_ssh_nodes import tasks
from support_trust import make_own

from shardlab.runs.rundir import RunDir

TRY = ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "shardlab1", "type", "veth", "peer", "name", "shardlab2"]


def why_no_network():
    """Returns the reason, in one line, why this machine cannot create the two nodes; None if it can."""
    if why_not() is not None or shutil.which("ip") is None:
        return why_not() or "nodes with a network of their own need the command ip"
    done = subprocess.run(TRY, capture_output=True, check=False)
    return None if done.returncode == 0 else "nodes with a network of their own need network namespaces"


WHY = why_no_network()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
# A node is locked under its address, so each test process uses its own addresses.
LAN = f"10.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
NODES = {"gpu1": f"{LAN}.1", "gpu2": f"{LAN}.2"}
SETTLE = """\
hostname "$1"; mount --make-rprivate /; mount --bind "$2" "$3"; echo ready; exec sleep 1000
"""
SSH = """\
#!/bin/sh
for word; do test "$word" != -G || exec /usr/bin/ssh "$@"; done
while :; do case $1 in -E) log=$2; shift 2;; -o | -i | -p | -l) shift 2;; --) shift; break;; -*) shift;; *) break;; esac; done
host=$1; shift
test "$1" != -- || shift
if ! test -f PIDS/"$host"; then
    echo "ssh: connect to host $host port 22: No route to host" | tee -a "${log:-/dev/null}" >&2
    exit 255
fi
exec nsenter --target "$(cat PIDS/"$host")" --net --mount --uts \
    env -i HOME="$HOME" PATH="$PATH" PYTHONPATH="$PYTHONPATH" sh -c "cd / && $*"
"""
CLUSTER = """\
schema: 1
name: apart
provider: ssh
nodes:
  - {name: FIRST, host: 127.0.0.1, roles: [controller]}
  - {name: gpu1, host: LAN.1}
  - {name: gpu2, host: LAN.2}
gpus: {per_node: 2}
ssh: {between_nodes: true}
"""
PAIR = """\
ip link add shardlab1 netns $1 type veth peer name shardlab2 netns $2
for node in 1 2; do
    nsenter --target $1 --net sh -euc "ip link set lo up; ip address add LAN.$node/24 dev shardlab$node"
    nsenter --target $1 --net ip link set shardlab$node up
    shift
done
"""

SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from shardlab.steps import report
dist.init_process_group("gloo")
assert dist.get_world_size() == int(open("size.txt").read())
for step in (1, 2, 3):
    total = torch.tensor(float(sys.argv[1]) * step)
    dist.all_reduce(total)
    report(step=step, loss=total.item(), tokens=1)
dist.destroy_process_group()
"""


@pytest.fixture
def first(tmp_path, monkeypatch):
    """Makes the two nodes and yields the workspace folder of the first node."""
    workspace, pids = tmp_path / "ws", tmp_path / "pids"
    make_own(workspace)
    for folder in (pids, tmp_path / "bin"):
        folder.mkdir()
    name = socket.gethostname().partition(".")[0].lower()
    holders = []
    for node, host in NODES.items():
        (tmp_path / node).mkdir()
        words = ["unshare", "--net", "--mount", "--uts", "sh", "-euc", SETTLE, "settle", node, tmp_path / node, workspace]
        holders.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout.readline() == "ready\n"
        (pids / host).write_text(str(holders[-1].pid))
    subprocess.run(["sh", "-euc", PAIR.replace("LAN", LAN), "pair", *(str(holder.pid) for holder in holders)], check=True)
    hosts = {name: "127.0.0.1", **NODES}
    nodes = [
        {"name": node, "host": host, "roles": ["worker"] if node in NODES else ["controller"], "python": sys.executable}
        for node, host in hosts.items()
    ]
    (workspace / ".shardlab/inventory.json").write_text(json.dumps({"schema": 1, "cluster": "apart", "nodes": nodes}))
    (workspace / "cluster.yaml").write_text(CLUSTER.replace("FIRST", name).replace("LAN", LAN))
    (tmp_path / "bin/ssh").write_text(SSH.replace("PIDS", str(pids)))
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    yield workspace
    command(workspace, "jobs", "cancel", "--all")
    for holder in holders:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def command(workspace, *words, code=0):
    argv = [sys.executable, "-P", "-m", *words, "--workspace", str(workspace)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
    logs = "".join(f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in workspace.glob("runs/*/log/*.log"))
    assert done.returncode == code, done.stderr + done.stdout + logs
    return done.stdout


def losses(folder, steps=None):
    return [[record.loss for record in folder.steps(rank).records[:steps]] for rank in range(4)]


def test_nodes_that_share_no_folder_train_as_one_machine_does(first, tmp_path):
    axes = "axes: {strategy: [ddp], gpus: [4]}\nzip: [{launcher: [torchrun, fork], nnodes: [2, 1]}]"
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX.format(name="small", steps=4, more=axes))
    here = tmp_path / "here"
    here.mkdir()
    command(first, "jobs", "submit", "--matrix", str(matrix), "--where", "nnodes == 2", "--wait")
    command(here, "jobs", "submit", "--matrix", str(matrix), "--where", "nnodes == 1", "--wait")
    (status,) = json.loads(command(first, "jobs", "status", "--json"))["runs"]
    assert (status["state"], status["hosts"]) == ("completed", ["gpu1", "gpu2"])
    apart, local = (RunDir(next((folder / "runs").glob("ddp-*"))) for folder in (first, here))
    assert losses(apart) == losses(local)
    assert len(losses(local)[0]) == 4
    assert not (apart.path / "samples").exists()
    (fetched,) = json.loads(command(first, "collect", "fetch", "--json"))
    assert (fetched["complete"], fetched.get("parts", []), fetched.get("problems", [])) == (True, [], [])
    assert {path.stem for path in (apart.path / "samples").iterdir()} == set(NODES)
    for node in NODES:
        part = {path.name for path in (tmp_path / node / "runs" / apart.run_id / "steps").iterdir()}
        assert len(part) == 2
    command(first, "collect", "summarize")
    assert (first / "report/index.html").exists()


def test_a_run_that_lost_a_node_resumes_from_the_parts_of_its_checkpoint(first, tmp_path):
    """The lost node behaves as if it had crashed: its processes are killed, and it accepts no login until the test brings it
    back."""
    saves = "instruments: {checkpoints: {every_steps: 5, keep: 2}}"
    axes = "axes: {strategy: [fsdp2], gpus: [4], nnodes: [2], launcher: [torchrun], seed: [1, 2]}"
    text = MATRIX.format(name="small", steps=FOREVER, more=axes)
    (tmp_path / "small.yaml").write_text(text.replace('prove: "off"', f'prove: "off"\n  {saves}'))
    command(first, "jobs", "submit", "--matrix", str(tmp_path / "small.yaml"))

    def runs():
        found = json.loads(command(first, "jobs", "status", "--json"))["runs"]
        return sorted(found, key=lambda run: (run["cell"]["seed"], run["attempt"]))

    def retried():
        return next((run for run in runs() if run["attempt"] == 2), None)

    until(lambda: (runs()[0]["step"] or 0) > 12, "the first run trains", HANG_S)
    lost, waits = runs()
    assert waits["scheduler"]["raw"] == "queued: waits for free nodes"
    command(first, "jobs", "cancel", waits["id"])
    folder = RunDir(first / "runs" / lost["id"])
    pid = tmp_path / "pids" / NODES["gpu2"]
    pid.rename(tmp_path / "away")
    dead = [task for task in tasks(folder) if task.environ()["SHARDLAB_NODE"] == "1"]
    sessions = {one for task in dead for one in task.parents() if "jobs.ssh.node_task" in " ".join(one.cmdline())}
    for process in [*sessions, *dead]:
        process.send_signal(signal.SIGKILL)
    until(lambda: runs()[0]["state"] == "node_fail", "a node that crashed", HANG_S)
    assert runs()[0]["why"].startswith("gpu2: the connection broke")
    fetched = {run["run"]: run for run in json.loads(command(first, "collect", "fetch", "--json", code=1))}
    assert [sentence.partition(": ")[0] for sentence in fetched[lost["id"]]["parts"]] == ["the part of gpu2 is missing"]

    assert "resumes from its checkpoint at step" in command(first, "jobs", "retry", "--only", "node_fail")
    until(lambda: retried()["scheduler"]["raw"].startswith("queued: gpu2 does not answer"), "it waits for the node", HANG_S)
    (tmp_path / "away").rename(pid)
    until(lambda: retried()["resumed_from_step"], "it resumes", HANG_S)
    begun = retried()["resumed_from_step"]
    assert begun >= 10
    until(lambda: retried()["step"] > begun, "it trains", HANG_S)
    command(first, "jobs", "cancel", "--all")
    assert retried()["state"] == "cancelled"
    fetched = json.loads(command(first, "collect", "fetch", "--json"))
    assert all(run["complete"] for run in fetched)
    again = RunDir(first / "runs" / retried()["id"])
    assert losses(again, begun) == losses(folder, begun)


def test_a_script_gets_its_folder_on_nodes_that_share_none(first, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/size.txt").write_text("4")
    (tmp_path / "own/train.py").write_text(SCRIPT)
    workload = {"command": ["python", "train.py", "{set.start}"], "folder": "own"}
    cells = {"defaults": {"workload": workload, "gpus": 4, "nnodes": 2, "launcher": "torchrun"}, "axes": {"set.start": [3]}}
    (tmp_path / "own.yaml").write_text(json.dumps({"schema": 1, "name": "own", **cells}))  # JSON is YAML
    command(first, "jobs", "submit", "--matrix", str(tmp_path / "own.yaml"), "--wait")
    command(first, "collect", "fetch")
    (run,) = map(RunDir, (first / "runs").glob("command-*"))
    assert [record.loss for record in run.steps(0).records] == [3 * 4 * step for step in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["size.txt", "train.py"]
