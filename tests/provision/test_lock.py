"""Only one command at a time changes a cluster. A second command says at once which command is running, and changes nothing."""

import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest
from support_practice import FILE
from support_trust import make_own

from provision import lock
from provision.cli import main
from provision.providers import ssh, virtual
from shardlab.cluster import cluster
from shardlab.errors import InputError, WorkspaceError

ROOT = Path(__file__).parents[2]
LOCAL = str(ROOT / "examples/local.yaml")
# Holds the lock whose path is the first argument, and starts a program that outlives the holder.
HOLD = """
import subprocess, sys, time
from pathlib import Path
from provision import lock
with lock.hold_locks([(Path(sys.argv[1]), "it")], ["provision", "my cluster.yaml", "down"]):
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def workspace(tmp_path):
    return make_own(tmp_path / "work space").path


@pytest.fixture
def hold():
    """Returns a function that starts a process which holds a lock. All started processes are killed after the test."""
    started = []

    def start(path):
        holder = subprocess.Popen([sys.executable, "-P", "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
        child = int(holder.stdout.readline())
        started.append((holder, child))
        return holder

    yield start
    for holder, child in started:
        holder.kill()
        holder.communicate()
        os.kill(child, signal.SIGKILL)


def files_of(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_second_command_says_in_one_sentence_who_is_at_work_and_changes_nothing(workspace, hold, capsys):
    holder = hold(workspace / ".shardlab/provision.lock")
    before = files_of(workspace)
    assert main([LOCAL, "--workspace", str(workspace)]) == 2
    said = capsys.readouterr().err
    user = pwd.getpwuid(os.geteuid()).pw_name
    who = f"is locked by process {holder.pid} of the user {user} on {gethostname()} since 2"
    assert f"error: the workspace {workspace} {who}" in said
    assert "with the command: provision 'my cluster.yaml' down; wait until it has ended. Nothing was changed." in said
    assert said.count("\n") == 1
    assert files_of(workspace) == before
    for verb in ("verify", "down", "warm"):
        assert main([LOCAL, verb, "--workspace", str(workspace)]) == 2
    for verb in ("plan", "facts"):  # these commands only read, so the lock does not stop them
        assert main([LOCAL, verb, "--workspace", str(workspace)]) == 0
    assert main([LOCAL, "request", "--workspace", str(workspace)]) == 2
    assert "nothing to request" in capsys.readouterr().err


def test_a_killed_holder_holds_nothing_although_its_programs_live_on(workspace, hold):
    holder = hold(workspace / ".shardlab/provision.lock")
    holder.kill()
    holder.wait()
    assert main([LOCAL, "down", "--workspace", str(workspace)]) == 0


def test_every_spelling_of_the_workspace_uses_the_same_lock(workspace, hold, monkeypatch, capsys):
    """The lock is found for every spelling of the workspace's path, also through a symlink."""
    hold(workspace / ".shardlab/provision.lock")
    link = workspace.parent / "link"
    link.symlink_to(workspace)
    monkeypatch.chdir(workspace)
    for spelling in (".", "../work space", str(link), str(link / ".." / "link")):
        assert main([LOCAL, "down", "--workspace", spelling]) == 2
        assert "is locked by process" in capsys.readouterr().err


@pytest.mark.parametrize("provider", ["virtual", "ssh"])
def test_another_workspace_uses_the_same_lock_of_a_cluster(workspace, hold, monkeypatch, provider, capsys):
    monkeypatch.setattr(virtual, "LOCKS_FOLDER", workspace / "locks")
    monkeypatch.setenv("HOME", str(workspace))
    text = FILE.replace("SHARED", "/srv/x").replace("provider: virtual", f"provider: {provider}")
    if provider == "ssh":
        text = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("lan:")).replace(
            "{name: ", "{host: h, name: "
        )
    for name in ("one", "two"):
        (workspace / name).mkdir()
        (workspace / name / "cluster.yaml").write_text(text)
    (path,) = {"virtual": virtual, "ssh": ssh}[provider].PROVIDER.locks(cluster.load_cluster(workspace / "one/cluster.yaml"))
    assert workspace in path.parents
    hold(path)
    for name in ("one", "two"):
        assert main(["down", "--workspace", str(workspace / name)]) == 2
        assert "the cluster test-practice is locked by process" in capsys.readouterr().err


def test_the_holder_of_a_lock_is_read_as_untrusted_text(workspace, hold, monkeypatch):
    monkeypatch.setattr(lock, "HOLDER_WAIT_S", 0.1)  # nobody writes a name into the file
    path = workspace / ".shardlab/provision.lock"
    hold(path)
    for text in (b"", b"\xff", b"[]", b'{"pid": "1"}', b'{"pid": 1, "user": "' + b"x" * 5000 + b'"}'):
        path.write_bytes(text)
        with (
            pytest.raises(InputError, match="process, which the lock file does not name"),
            lock.hold_locks([(path, "it")], []),
        ):
            pass


def test_a_killed_process_is_not_named_as_the_holder_of_the_lock(workspace, hold):
    path = workspace / ".shardlab/provision.lock"
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    hold(path)
    written = path.read_text()
    old = {"pid": int(dead.stdout), "user": "old", "host": gethostname(), "since": "", "command": ""}
    # the number of the old process now belongs to another process
    for entry in (old, old | {"pid": os.getpid(), "created": 1.0}):
        path.write_text(json.dumps(entry))
        with pytest.raises(InputError, match="which the lock file does not name"), lock.hold_locks([(path, "it")], []):
            pass
    path.write_text(written)
    with pytest.raises(InputError, match="by process"), lock.hold_locks([(path, "it")], []):
        pass


def test_a_link_or_a_pipe_in_the_place_of_the_lock_is_refused_and_left_alone(workspace):
    victim = workspace / "victim"
    victim.write_text("theirs")
    (workspace / "link").symlink_to(victim)
    os.mkfifo(workspace / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(WorkspaceError, match="cannot lock"), lock.hold_locks([(workspace / name, "it")], []):
            pass
    assert victim.read_text() == "theirs"


def test_a_lock_is_free_again_after_its_block(workspace):
    path = workspace / "lock"
    for _ in range(2):
        with lock.hold_locks([(path, "it")], ["provision"]):
            pass


def test_no_other_user_can_open_the_lock_of_a_practice_cluster_and_hold_it(workspace, monkeypatch):
    folder = workspace / "locks"
    folder.mkdir(mode=0o755)
    (folder / "older.lock").touch(mode=0o644)
    monkeypatch.setattr(virtual, "LOCKS_FOLDER", folder)
    (workspace / "cluster.yaml").write_text(FILE.replace("SHARED", "/srv/x"))
    (path,) = virtual.list_lock_paths(cluster.load_cluster(workspace / "cluster.yaml"))
    with lock.hold_locks([(path, "it")], []):
        assert [one.stat().st_mode & 0o777 for one in (folder, path, folder / "older.lock")] == [0o700, 0o600, 0o600]
