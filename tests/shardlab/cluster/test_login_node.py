"""The login node of a Slurm site: how shardlab recognizes it, that no run trains on it, and how jobs find the site's Python."""

import json
import os
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S

from jobs import cli, on_controller
from jobs.planning import plan
from jobs.rendering import render
from provision import cli as provision_cli
from provision.command import progress
from provision.nodes.login_node import make_login_address, make_login_node
from shardlab.cluster import cluster, login_node
from shardlab.errors import InputError
from shardlab.remote import remote, shared_connection
from shardlab.remote.remote import Unreachable
from shardlab.verb import Invocation
from shardlab.workspace.workspace import Workspace

SITE = "schema: 1\nname: site\nprovider: slurm\nslurm: {partition: gpu}\nstorage: {shared: SHARED}\n"
MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, gpus: 1, steps: 1, global_batch_size: 2, launcher: fork}
axes: {strategy: [single]}
baseline: single
"""


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Makes this machine look like a login node: puts stand-ins for the Slurm commands `sbatch` and `sinfo` on PATH, which
    always succeed. Returns their folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "sinfo"):
        (folder / name).write_text("#!/bin/sh\necho gpu\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    return folder


def test_a_machine_where_slurm_answers_on_no_node_of_a_job_is_a_login_node(client, monkeypatch):
    assert login_node.is_login_node()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert login_node.is_login_node()  # `salloc` starts a shell on the login node
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    assert not login_node.is_login_node()
    monkeypatch.delenv("SLURMD_NODENAME")
    (client / "sinfo").write_text("#!/bin/sh\necho CLUSTER: cm4\n")
    assert not login_node.is_login_node()
    (client / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert not login_node.is_login_node()
    (client / "sbatch").unlink()
    assert not login_node.is_login_node()


def test_training_on_a_login_node_needs_the_option_here(client, tmp_path, monkeypatch, capsys):
    (tmp_path / "m.yaml").write_text(MATRIX)
    words = ["submit", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "login node of a Slurm cluster" in said
    assert "provision init > cluster.yaml" in said
    assert not (tmp_path / "runs").exists()
    source = render.make_render_context("m", cluster.THIS_MACHINE, Workspace(tmp_path))
    plan.must_run_here(source, allow_login_node=True)
    with pytest.raises(InputError):
        plan.must_run_here(source, allow_login_node=False)


@pytest.mark.parametrize("verb", ["apply", "verify"])
def test_provision_starts_no_ranks_on_a_login_node(verb, client, tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text("schema: 1\nname: here\nprovider: local\n")
    assert provision_cli.main([str(tmp_path / "cluster.yaml"), verb, "--workspace", str(tmp_path)]) == 2
    assert "To train here all the same: --here." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "bin"] == ["cluster.yaml"]


def invocation(tmp_path: Path, *words: str) -> Invocation:
    text = SITE.replace("SHARED", str(tmp_path / "shared"))
    (tmp_path / "cluster.yaml").write_text(text)
    return Invocation(cli.parser().parse_args([*words, "--workspace", str(tmp_path)]))


def test_jobs_continues_in_the_environment_of_the_site(client, tmp_path, monkeypatch):
    """On the login node, `jobs submit` starts itself again with the Python that `provision` installed for the site."""
    python = tmp_path / "shared/python-0/bin/python"
    node = {"name": "login", "host": "localhost", "roles": ["controller"], "python": str(python)}
    (tmp_path / ".shardlab").mkdir()
    (tmp_path / ".shardlab/inventory.json").write_text(json.dumps({"schema": 1, "cluster": "site", "nodes": [node]}))
    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append((path, argv)))
    asked = invocation(tmp_path, "submit", "--matrix", "quickstart")
    assert on_controller.starts_runs_here(asked.cluster)
    on_controller.enter_environment(asked)
    assert started == [
        (str(python), [str(python), "-P", "-m", "jobs", "submit", f"--workspace={tmp_path}", "--matrix=quickstart"])
    ]
    monkeypatch.setenv(login_node.PYTHON_VARIABLE, str(python))
    on_controller.enter_environment(asked)
    on_controller.enter_environment(invocation(tmp_path, "status"))
    assert len(started) == 1


def test_a_cluster_with_a_remote_login_node_is_not_on_this_machine(client, tmp_path, monkeypatch):
    asked = invocation(tmp_path, "status")
    with_login = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert on_controller.starts_runs_here(with_login)
    (tmp_path / "cluster.yaml").write_text((tmp_path / "cluster.yaml").read_text() + "login: {host: login1}\n")
    assert asked.cluster.login is not None
    assert not on_controller.starts_runs_here(asked.cluster)
    monkeypatch.setenv(login_node.PYTHON_VARIABLE, f"{tmp_path}/shared/python-0/bin/python")
    assert on_controller.starts_runs_here(asked.cluster), "this process is the one that a desk started at the site"


SSH = """#!{python}
import pathlib, sys
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "check" in sys.argv:
    sys.exit(0 if (folder / "open").exists() else 255)
if (folder / "refuses").exists():
    sys.stderr.write("alice@login1: Permission denied (publickey,keyboard-interactive).\\n")
    sys.exit(255)
(folder / "open").touch()
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_connection_is_opened_once(ssh):
    for _ in range(3):
        shared_connection.open_connection(["ssh", "-T", "--", "login1"], "login1")
    calls = (ssh / "calls").read_text().splitlines()
    assert [call for call in calls if "check" not in call] == [
        "-f -N -o BatchMode=yes -o LogLevel=DEBUG1 -o ControlMaster=auto -T -- login1"
    ]


def test_without_a_terminal_an_error_says_how_to_log_in(ssh, monkeypatch):
    (ssh / "refuses").touch()
    with pytest.raises(shared_connection.NoLogin) as caught:
        shared_connection.open_connection(["ssh", "-T", "--", "login1"], "login1")
    assert "log in once on a terminal: ssh -f -N -o BatchMode=no -T -- login1" in str(caught.value)


def test_the_folder_of_the_sockets_is_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_connection, "MAX_FOLDER_BYTES", 200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "shardlab/ssh").mkdir(parents=True, mode=0o755)
    assert shared_connection.make_socket_folder() == tmp_path / "shardlab/ssh"
    assert (tmp_path / "shardlab/ssh").stat().st_mode & 0o077 == 0
    (tmp_path / "shardlab/ssh").rmdir()
    (tmp_path / "shardlab/ssh").symlink_to(tmp_path)
    made = shared_connection.make_socket_folder()
    assert made.name.startswith("ssh-")
    assert made.stat().st_mode & 0o077 == 0


def test_a_long_path_gets_a_short_folder_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/{'x' * 80}")
    made = shared_connection.make_socket_folder()
    assert str(os.geteuid()) in made.name
    assert made.stat().st_mode & 0o077 == 0


def test_provision_logs_in_before_it_draws_a_table(ssh, tmp_path, monkeypatch, capsys):
    """`provision` logs in to each node first. If SSH asked for a password after the live table is drawn, the question would
    stand in the middle of the table."""
    (ssh / "refuses").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    (tmp_path / "cluster.yaml").write_text(f"{SITE.replace('SHARED', str(tmp_path))}login: {{host: login1}}\n")
    drawn = []
    monkeypatch.setattr(progress, "show_progress", lambda *_: drawn.append("table"))
    assert provision_cli.main(["plan", "--workspace", str(tmp_path)]) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert not drawn


RUNS_HERE = """#!/bin/sh
case "$*" in *check*) exit 0 ;; esac
test -e '{0}/broken' && {{ echo 'mux_client: Broken pipe' >&2; exit 255; }}
for last; do :; done
exec sh -c "$last"
"""


@pytest.fixture
def login(tmp_path, monkeypatch):
    """A login node that is this machine: a stand-in for `ssh` runs each command here, or exits with 255 if the file `broken`
    exists."""
    (tmp_path / "ssh").write_text(RUNS_HERE.format(tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    return make_login_node(make_login_address("login1"))


@pytest.mark.parametrize(
    ("script", "limit_s", "code"),
    [
        ("exit 0", HANG_S, 0),
        ("exit 3", HANG_S, 3),
        # These are the exit codes of `timeout` at the limit, but the commands end long before their limit.
        ("exit 124", HANG_S, 124),
        ("kill -9 $$", HANG_S, 137),
        ("sleep 600", 0.2, None),
        ('trap "" TERM; sleep 600', 0.2, None),
    ],
    ids=["done", "own exit code", "exit code 124", "killed", "ended at its limit", "killed at its limit"],
)
def test_a_command_on_a_login_node_has_no_exit_code_only_if_its_limit_ended_it(login, script, limit_s, code):
    answer = login.run(["sh", "-c", f"echo out; echo err >&2; {script}"], timeout_s=limit_s)
    assert (answer.code, answer.stdout, answer.stderr.splitlines()[0]) == (code, "out\n", "err")


def test_a_command_on_a_login_node_without_a_connection_or_as_root_is_not_run(login, tmp_path):
    refused = login.run(["touch", str(tmp_path / "ran")], timeout_s=HANG_S, root=True)
    assert (refused.code, "needs root" in refused.stderr) == (1, True)
    (tmp_path / "broken").touch()
    with pytest.raises(Unreachable, match=r"login1: mux_client: Broken pipe\."):
        login.run(["touch", str(tmp_path / "ran")], timeout_s=HANG_S)
    assert not (tmp_path / "ran").exists()
