"""Scripts are read from the cluster file alone: no inventory, no login, and nothing is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import main
from shardlab.remote import remote_workspace
from shardlab.workspace.workspace import Workspace

SLURM = """schema: 1
name: far
provider: slurm
login: {host: login.example.invalid, user: alice}
slurm: {partition: null, account: m1_g, constraint: gpu, qos: regular}
gpus: {per_node: 4}
storage: {shared: /scratch/alice/shardlab}
"""
HERE = SLURM.replace("login: {host: login.example.invalid, user: alice}\n", "")
SSH = """schema: 1
name: far
provider: ssh
nodes: [{name: g0, host: 192.0.2.1}, {name: g1, host: 192.0.2.2}]
gpus: {per_node: 4}
"""
CLOUDLAB = """schema: 1
name: far
provider: cloudlab
cloudlab: {project: p, hardware: d8545, nodes: 2, hours: 16, blockstore_gib: 0}
ssh: {user: alice}
gpus: {type: a100, per_node: 4}
storage: {shared: /mydata/shardlab, server: node0}
slurm: {partition: gpu}
"""
MATRIX = """schema: 1
name: m
defaults: {workload: gpt2-tiny, gpus: 8, nnodes: 2, steps: 3, global_batch_size: 8, optimizer: {name: sgd, lr: 0.1}}
axes: {strategy: [ddp]}
"""
ALL = {"slurm": SLURM, "slurm without login": HERE, "ssh": SSH, "cloudlab": CLOUDLAB}
PYTHON = "/scratch/alice/shardlab/python-DIGEST/bin/python"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `jobs` in a workspace; returns its exit code and its output. A connection or a call of Slurm fails the test."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ssh", "sbatch"):
        (tools / name).write_text(f"#!/bin/sh\necho called > {tmp_path}/{name}\nexit 9\n")
        (tools / name).chmod(0o755)
    (tools / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = another'\n")
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "m.yaml").write_text(MATRIX)

    def run(text, *words):
        (workspace / "cluster.yaml").write_text(text)
        trust = ["--trust"] if (workspace / ".shardlab").exists() else []
        code = main([*words, "--matrix", str(workspace / "m.yaml"), "--workspace", str(workspace), *trust])
        assert [name for name in ("ssh", "sbatch") if (tmp_path / name).exists()] == []
        return code, capsys.readouterr()

    run.workspace = workspace
    return run


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("words", [("submit", "--dry-run", "-v"), ("render",), ("plan",)], ids=" ".join)
def test_scripts_are_printed_from_the_cluster_file_alone(kind, words, command):
    code, output = command(ALL[kind], *words)
    assert code == 0, output.err
    assert sorted(path.name for path in command.workspace.iterdir()) == ["cluster.yaml", "m.yaml"]
    if words != ("plan",):
        assert "python-DIGEST/bin/python -m jobs.supervisor.attempt" in output.out
        assert "# unknown  python-DIGEST stands for" in output.out
        assert "made from the cluster file, without asking far: `jobs submit` asks it for the data sets" in output.err
        assert ("Slurm" in output.err) == (kind != "ssh")


def test_the_paths_are_those_on_the_cluster(command):
    _, output = command(SLURM, "submit", "--dry-run", "-v")
    assert f"exec {PYTHON} -m" in output.out
    assert "\ncd /scratch/alice/shardlab/workspaces/w-" in output.out
    assert str(command.workspace) not in output.out


def test_a_script_is_printed_whole_on_a_narrow_terminal(command, monkeypatch):
    _, output = command(SLURM, "submit", "--dry-run", "-v")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    _, narrow_output = command(SLURM, "submit", "--dry-run", "-v")
    (long_line,) = [line for line in output.out.splitlines() if line.startswith("cd /scratch/alice/shardlab/workspaces/w-")]
    assert long_line in narrow_output.out.splitlines()


def test_after_provision_the_interpreter_is_known(command):
    node = {"name": "login", "host": "login.example.invalid", "python": "/p/bin/python", "roles": ["controller"]}
    (command.workspace / ".shardlab").mkdir()
    inventory = {"schema": 1, "cluster": "far", "nodes": [node]}
    (command.workspace / ".shardlab/inventory.json").write_text(json.dumps(inventory))
    _, output = command(SLURM, "submit", "--dry-run", "-v")
    assert "exec /p/bin/python -m" in output.out
    assert "unknown" not in output.out


def test_scripts_may_be_written_to_a_folder(command, tmp_path):
    code, _ = command(SLURM, "render", "--out", str(tmp_path / "out"))
    assert code == 0
    (script,) = (tmp_path / "out").glob("*/job.sbatch")
    assert f"exec {PYTHON} -m" in script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_document_names_the_runs(command):
    _, output = command(SLURM, "render", "--json")
    (run,) = json.loads(output.out)
    assert Path(run["path"]).name == run["id"]


def test_after_runs_were_submitted_a_dry_run_asks_the_cluster(command, monkeypatch):
    from jobs import on_controller

    remote = remote_workspace.RemoteWorkspace(
        1, "far", "login.example.invalid", None, "alice", None, "", "strict", "/p/bin/python", "/scratch/w", "mark"
    )
    remote_workspace.write_remote_workspace(Workspace(command.workspace), remote)
    asked = []
    monkeypatch.setattr(on_controller, "find_remote_workspace", lambda invocation: asked.append(invocation) or None)
    monkeypatch.setattr(on_controller.remote_workspace, "find_remote_workspace", lambda *_: remote)
    assert command(SLURM, "render")[0] == 0  # scripts for reading never ask
    assert on_controller.is_preview(asked[0])
    command(SLURM, "submit", "--dry-run")
    assert not on_controller.is_preview(asked[1])
