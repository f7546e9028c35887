"""Commands about a cluster whose controller is another machine: what shardlab sends to the controller, and what it refuses
before it sends anything."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support_trust import make_own

from jobs import on_controller
from jobs.cli import main, parser
from shardlab.cluster import cluster
from shardlab.cluster.address import Address
from shardlab.errors import InputError
from shardlab.remote import proxy_jump, remote_workspace
from shardlab.remote.proxy_jump import JumpHost
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.remote.ssh_command import make_ssh_command
from shardlab.verb import Invocation
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

NEEDS_SSH = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed here")
FILE = """\
schema: 1
name: far
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
storage: {shared: SHARED}
slurm: {partition: batch}
"""
THERE = RemoteWorkspace(
    schema=1, cluster="far", host="10.9.9.1", port=22, user="alice", identity="/home/a b/key", known_hosts="/w s/known",
    host_keys="strict", python="/opt/p y/bin/python", workspace="/shared/it's", mark="m",
)  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    made = make_own(tmp_path / "w")
    (made.path / "cluster.yaml").write_text(FILE.replace("SHARED", "/mydata"))
    return made


@pytest.fixture
def invocation(workspace):
    """Returns a function that takes the words of a `jobs` command and returns the parsed command for this workspace."""
    return lambda *words: Invocation(parser().parse_args(["--workspace", str(workspace.path), *words]))


def test_a_cluster_without_an_inventory_is_reported(workspace, capsys):
    assert main(["submit", "--matrix", "quickstart", "--workspace", str(workspace.path)]) == 2
    assert "inventory.json: no such file" in capsys.readouterr().err
    assert not (workspace.shardlab_folder / "away.json").exists()


def test_an_inventory_of_another_cluster_is_refused(workspace, invocation):
    (workspace.shardlab_folder / "inventory.json").write_text('{"schema": 1, "cluster": "near", "nodes": []}')
    with pytest.raises(InputError, match="describes the cluster near, not far"):
        on_controller.find_remote_workspace(invocation("submit", "--matrix", "quickstart"))


def test_a_slurm_cluster_without_a_shared_folder_is_refused(workspace, invocation):
    (workspace.path / "cluster.yaml").write_text(FILE.replace("storage: {shared: SHARED}\n", ""))
    with pytest.raises(InputError, match="no folder that all nodes share"):
        on_controller.find_remote_workspace(invocation("submit", "--matrix", "quickstart"))


@pytest.mark.parametrize(
    ("storage", "folder"),
    [("", "/opt/shardlab/workspaces"), ("storage: {disk: /dev/sdb, mount: /mydata}\n", "/mydata/workspaces")],
)
def test_without_slurm_the_runs_of_nodes_that_share_no_folder_are_on_the_first_node(workspace, invocation, storage, folder):
    text = FILE.replace("storage: {shared: SHARED}\n", storage).replace("slurm: {partition: batch}\n", "")
    (workspace.path / "cluster.yaml").write_text(text)
    node = {"name": "gpu0", "host": "10.9.9.1", "python": "/p/bin/python"}
    (workspace.shardlab_folder / "inventory.json").write_text(json.dumps({"schema": 1, "cluster": "far", "nodes": [node]}))
    there = on_controller.find_remote_workspace(invocation("submit", "--matrix", "quickstart"))
    assert (there.host, str(Path(there.workspace).parent)) == ("10.9.9.1", folder)


def test_runs_of_a_workspace_stay_on_one_cluster(workspace, invocation):
    remote_workspace.write_remote_workspace(workspace, THERE)
    (workspace.path / "cluster.yaml").write_text("schema: 1\nname: here\nprovider: local\n")
    with pytest.raises(InputError, match="its runs are on the cluster far, not on here"):
        on_controller.find_remote_workspace(invocation("submit", "--matrix", "quickstart"))
    assert on_controller.find_remote_workspace(invocation("status")) == THERE


def test_plans_and_scripts_for_reading_need_no_cluster(workspace, invocation):
    """`jobs plan` and `jobs render --out` are not sent to a remote controller."""
    assert on_controller.find_remote_workspace(invocation("plan", "--matrix", "quickstart")) is None
    assert on_controller.find_remote_workspace(invocation("render", "--matrix", "quickstart", "--out", "x")) is None


def test_a_workspace_outside_of_the_shared_folder_is_refused_on_the_controller(workspace, tmp_path):
    where = cluster.load_cluster(workspace.path / "cluster.yaml")
    with pytest.raises(InputError, match="lies outside of /mydata"):
        on_controller.must_suit_workspace(where, workspace)
    (tmp_path / "cluster.yaml").write_text(FILE.replace("SHARED", str(tmp_path)))
    on_controller.must_suit_workspace(cluster.load_cluster(tmp_path / "cluster.yaml"), Workspace(tmp_path / "below"))
    with pytest.raises(InputError, match="drops backslashes"):
        on_controller.must_suit_workspace(cluster.load_cluster(tmp_path / "cluster.yaml"), Workspace(tmp_path / "be\\low"))


def test_words_with_spaces_and_quotes_arrive_unchanged_at_a_remote_command(tmp_path):
    folder = tmp_path / 'it\'s a "workspace" $HOME;'
    there = RemoteWorkspace(**{**{name: getattr(THERE, name) for name in THERE.__struct_fields__}, "python": sys.executable})
    there = RemoteWorkspace(**{**{name: getattr(there, name) for name in there.__struct_fields__}, "workspace": str(folder)})
    *ssh, host, command = there.make_ssh_command("shardlab.remote.upload", ["--json"], "")
    assert (ssh[0], host) == ("ssh", "10.9.9.1")
    assert 'UserKnownHostsFile="/w s/known"' in " ".join(ssh)
    given = json.dumps({"matrices/a b.yaml": "text", "cluster.yaml": "c"}).encode()
    done = subprocess.run(["sh", "-c", command], input=given, capture_output=True, check=True)
    assert json.loads(done.stdout)["version"]
    assert (folder / "matrices/a b.yaml").read_text() == "text"


def test_a_template_that_was_removed_here_is_removed_there(tmp_path):
    for texts in ({"templates/launch/a.j2": "old", "templates/b.j2": "old"}, {"templates/b.j2": "new", "cluster.yaml": "c"}):
        subprocess.run(
            [sys.executable, "-P", "-m", "shardlab.remote.upload", "--workspace", str(tmp_path)],
            input=json.dumps(texts).encode(), capture_output=True, check=True,
        )  # fmt: skip
        (tmp_path / "templates/notes.txt").write_text("not a template")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"templates/b.j2", "templates/notes.txt", "cluster.yaml", f".shardlab/trusted.{os.getuid()}.json"}
    assert workspace_trust.is_own(Workspace(tmp_path))
    assert (tmp_path / "templates/b.j2").read_text() == "new"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "runs/a/run.json", ".shardlab/away.json", "a/../../x"])
def test_an_upload_outside_of_its_folders_is_refused(tmp_path, name):
    """An upload is refused if it names a file outside of the folders that an upload may write."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shardlab.remote.upload", "--workspace", str(tmp_path / "w")],
        input=json.dumps({name: "x"}).encode(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"no file may be written there" in done.stderr
    assert not list(tmp_path.rglob("x"))
    assert not Path("/etc/x").exists()


def test_host_keys_are_held_to_the_files_of_the_workspace():
    """`ssh` checks host keys strictly unless the cluster file says accept-new."""
    words = make_ssh_command(Address("host", 2222, "bob", Path("/k"), Path("/known"), "accept-new"))
    assert "StrictHostKeyChecking=accept-new" in words
    assert words[-4:] == ["-l", "bob", "--", "host"]
    assert "StrictHostKeyChecking=yes" in make_ssh_command(Address("host"))


def test_tokens_of_ssh_in_paths_are_escaped():
    """In paths, `%` is doubled and quotes are escaped, so that ssh does not expand tokens such as %h in them."""
    words = make_ssh_command(Address("host", identity=Path("/100%h"), known_hosts=Path('/a "b" %d')))
    assert "/100%%h" in words
    assert 'UserKnownHostsFile="/a \\"b\\" %%d"' in " ".join(words)
    first, second = JumpHost("gate"), JumpHost("inner", "alice", 2222)
    assert proxy_jump.make_proxy_option([first], lambda _: ["-o", "X=50%"]) == [
        "-o",
        "ProxyCommand=ssh -W '[%h]:%p' -o X=50%% -- gate",
    ]
    assert proxy_jump.make_proxy_option([first, second], lambda _: []) == [
        "-o",
        "ProxyCommand=ssh -W '[%h]:%p' -o 'ProxyCommand=ssh -W '\"'\"'[%%h]:%%p'\"'\"' -- gate' -p 2222 -l alice -- inner",
    ]


def sent_script(argv):
    """The script that the last word of an ssh command runs, as `wrap_for_any_shell` packs it."""
    return base64.b64decode(argv[-1].split("echo ")[1].split(" ")[0]).decode()


@NEEDS_SSH
@pytest.mark.parametrize(
    ("text", "jump"),
    [
        ("gate", JumpHost("gate")),
        ("Alice@gate:2222", JumpHost("gate", "Alice", 2222)),
        ("ssh://alice@gate:22/", JumpHost("gate", "alice", 22)),
        ("a@b@gate:22", JumpHost("gate", "a@b", 22)),
        ("alice@[10.0.0.1]:22", JumpHost("10.0.0.1", "alice", 22)),
        ("[fe80::1]", JumpHost("fe80::1")),
        ("none", None),
    ],
)
def test_the_jump_host_is_read_from_the_output_of_ssh(tmp_path, monkeypatch, text, jump):
    """`proxy_jump` asks the real OpenSSH command `ssh -G`; only the configuration file of ssh is written by the
    test."""
    (tmp_path / "config").write_text(f"Host far\n  ProxyJump {text}\n")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert proxy_jump.find_jumps(proxy_jump.read_settings(JumpHost("far"))) == (() if jump is None else (jump,))


class Controller:
    """A stand-in for a controller (the machine that executes commands about runs): stores the files and the words that shardlab
    sends to it."""

    host, workspace = "head", "/mydata/w"

    def __init__(self, monkeypatch):
        monkeypatch.setattr(on_controller.remote_workspace, "upload_files", lambda _there, texts: self.brought.update(texts))
        monkeypatch.setattr(on_controller.remote_workspace, "write_remote_workspace", lambda *_: None)
        self.brought = {}

    def run_interactively(self, *handed):
        self.handed = handed
        return 0


@pytest.mark.parametrize("form", ["{}={}", "{} {}"], ids=["with =", "apart"])
def test_paths_of_this_machine_are_replaced_in_a_remote_command(workspace, invocation, monkeypatch, form):
    """Paths of this machine are removed from the command line or replaced by the paths of the uploaded files."""
    matrix = workspace.path / "m.yaml"
    matrix.write_text("schema: 1\nname: m\ndefaults: {workload: gpt2-tiny, steps: 1}\naxes: {strategy: [single]}\n")
    file = workspace.path / "cluster.yaml"
    ours = [("--workspace", workspace.path), ("--matrix", matrix), ("--cluster", file)]
    words = ["submit", *(word for option in ours for word in form.format(*option).split(" ")), "--wait", "--where", "gpus > 1"]
    there = Controller(monkeypatch)
    assert on_controller.run_remotely(there, invocation(*words)) == 0
    assert there.handed == ("jobs", ["submit", "--matrix=/mydata/w/matrices/m.yaml", "--where=gpus > 1", "--wait"])
    assert there.brought == {"cluster.yaml": file.read_bytes(), "matrices/m.yaml": matrix.read_bytes()}


def test_the_cluster_file_on_the_cluster_has_no_signature_of_a_url(workspace, invocation, monkeypatch):
    file = workspace.path / "cluster.yaml"
    sets = "data: {sets: [{name: cifar10, archive: 'https://h/a?sig=0123&b=4', sha256: %s}]}\n" % ("a" * 64)
    file.write_text(file.read_text() + sets)
    there = Controller(monkeypatch)
    assert on_controller.run_remotely(there, invocation("submit", "--matrix", "quickstart")) == 0
    assert there.brought["cluster.yaml"].decode() == file.read_text().replace("?sig=0123&b=4", "")


def test_words_behind_two_hyphens_are_no_options(workspace, invocation, monkeypatch):
    """A word after `--` is not treated as an option, even if it is `--workspace`."""
    there = Controller(monkeypatch)
    words = ["logs", "--workspace", "here", "--", "--workspace"]
    assert on_controller.run_remotely(there, invocation(*words)) == 0
    assert there.handed == ("jobs", ["logs", "--", "--workspace"])
    assert sent_script(THERE.make_ssh_command("jobs", ["logs", "--", "run"], "")).endswith(
        """ logs --workspace '/shared/it'"'"'s' -- run"""
    )


def lend(workspace, expires):
    workspace.shardlab_folder.mkdir(exist_ok=True)
    lease = {"expires": expires, "read": "2026-01-01T00:00:00Z", "source": "portal"}
    node = {"name": "gpu0", "host": "10.9.9.1", "roles": ["controller", "worker"], "python": "/p/bin/python"}
    text = json.dumps({"schema": 1, "cluster": "far", "nodes": [node], "lease": lease})
    (workspace.shardlab_folder / "inventory.json").write_text(text)
    return text


@pytest.mark.parametrize("verb", ["submit", "status", "retry", "logs", "cancel"])
def test_the_lease_is_uploaded_before_a_remote_command_reads_the_lease(workspace, invocation, verb, monkeypatch):
    brought = []

    def ask(_remote, _module, _words, _shape, *, input_bytes):
        brought.append(json.loads(input_bytes))

    monkeypatch.setattr(RemoteWorkspace, "ask_command", ask)
    monkeypatch.setattr(RemoteWorkspace, "run_interactively", lambda there, module, words: 0)
    words = [verb, "--matrix", "quickstart"] if verb == "submit" else [verb, "run"]
    assert on_controller.run_remotely(THERE, invocation(*words)) == 0
    assert not any(".shardlab/inventory.json" in one for one in brought)
    text = lend(workspace, "2099-01-01T00:00:00Z")
    assert on_controller.run_remotely(THERE, invocation(*words)) == 0
    reads = verb in ("submit", "status", "retry")
    assert (brought[-1:] != [] and brought[-1].get(".shardlab/inventory.json") == text) == reads


def test_an_inventory_alone_removes_no_template(tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/a.j2").write_text("own")
    subprocess.run(
        [sys.executable, "-P", "-m", "shardlab.remote.upload", "--workspace", str(tmp_path)],
        input=json.dumps({".shardlab/inventory.json": "{}"}).encode(), capture_output=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "templates/a.j2").read_text() == "own"
    assert (tmp_path / ".shardlab/inventory.json").read_text() == "{}"


@NEEDS_SSH
def test_after_the_lease_the_status_is_that_of_the_fetched_runs(workspace, capsys, monkeypatch):
    there = RemoteWorkspace(
        **{**{name: getattr(THERE, name) for name in THERE.__struct_fields__}, "host": "127.0.0.1", "port": 1}
    )
    remote_workspace.write_remote_workspace(workspace, there)  # no SSH server listens at the port of this controller
    words = ["--workspace", str(workspace.path)]
    lend(workspace, "2099-01-01T00:00:00Z")
    assert main(["status", *words]) == 1
    assert "the lease" not in capsys.readouterr().err
    lend(workspace, "2026-02-01T00:00:00Z")
    assert main(["status", *words]) == 0
    said = capsys.readouterr()
    assert "the lease ended 2026-02-01 00:00 UTC" in said.err
    assert "no runs in" in said.out
    assert main(["cancel", "--all", *words]) == 1
    assert "the lease ended 2026-02-01" in capsys.readouterr().err
