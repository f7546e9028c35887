"""Another user of this machine who makes the folders or locks of shardlab in /tmp first stops no command of this user.

The tests act as two users, so they need root.
"""

import contextlib
import os
import subprocess
import tempfile
import warnings
from pathlib import Path

import psutil
import pytest

from jobs.schedulers import ssh
from jobs.ssh import node_lock, node_task
from shardlab.cluster import node_folder
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.remote import shared_connection
from shardlab.workspace.inventory import InventoryNode

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
US, OTHER = 64_301, 64_302  # ids of users who own nothing else


def as_us(act):
    """Call `act` in a process of the user US, and return the text that it returns. An exception is returned as text, too."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process that has threads
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(US)
            os.setuid(US)
            os.write(into, str(act()).encode())
        except BaseException as error:  # noqa: BLE001 - a forked process must not return into the tests
            os.write(into, repr(error).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def as_other(command, folder):
    subprocess.run(["sh", "-c", command], user=OTHER, group=OTHER, extra_groups=[], cwd=folder, check=True)


@pytest.fixture
def shared(monkeypatch):
    """A folder that stands for /tmp: every user can make files in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        for module, name in ((node_lock, "LOCK_FOLDER"), (shared_connection, "SHORT_FOLDER")):
            monkeypatch.setattr(module, name, Path(folder))
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}/{'x' * 60}")
        yield Path(folder)


@pytest.mark.parametrize(
    "squat", ["mkdir -m 777 {}", "mkdir -m 700 {}", "ln -s /etc {}", "mkfifo {}", "touch {} && chmod 0 {}"]
)
@pytest.mark.parametrize("name", ["shardlab-ssh-{}", "shardlab-data-{}"])
def test_a_folder_that_another_user_made_first_is_not_used(shared, squat, name):
    name = name.format(US)
    as_other(squat.replace("{}", name), shared)
    before = (shared / name).lstat()
    make = shared_connection.make_socket_folder if "ssh" in name else node_folder._make_user_folder
    made = Path(as_us(make))
    assert (made.parent, made.name[: len(name) + 1]) == (shared, f"{name}-")
    status = made.lstat()
    assert (status.st_uid, status.st_mode & 0o777) == (US, 0o700)
    assert as_us(make) == str(made), "the next command finds the same folder"
    assert (shared / name).lstat() == before


def lock_node():
    with node_lock.hold_lock("node", "n1", ssh._raise_node_in_use) as lock:
        return Path(f"/proc/self/fd/{lock}").readlink()


@pytest.mark.parametrize("squat", ["touch {} && chmod 0 {}", "ln -s /etc/passwd {}", "mkfifo -m 666 {}", "mkdir -m 777 {}"])
def test_a_lock_that_another_user_made_unusable_is_not_waited_for(shared, squat):
    as_other(squat.replace("{}", "shardlab-node-n1.lock"), shared)
    assert as_us(lock_node) == str(shared / f"shardlab-locks-{US}/shardlab-node-n1.lock")


def test_users_lock_the_same_file_whatever_the_umask_and_may_not_write_to_it(shared):
    def lock_node_strictly():
        os.umask(0o077)
        return lock_node()

    lock = shared / "shardlab-node-n1.lock"
    assert as_us(lock_node_strictly) == str(lock)
    assert (lock.stat().st_uid, lock.stat().st_mode & 0o777) == (US, 0o644)
    as_other(f"flock -x -n {lock} true", shared)


def test_a_run_that_waits_for_another_user_names_the_user(shared, monkeypatch):
    """The process that holds the lock, its user and its command are in the reason of the run, and in the error of a node."""
    lock = shared / "shardlab-node-n1.lock"
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, 2); print('x', flush=True); time.sleep(600)"
    )
    words = ["/usr/bin/env", "python3", "-S", "-c", code, str(lock)]
    with subprocess.Popen(words, user=OTHER, group=OTHER, extra_groups=[], cwd="/", stdin=-1, stdout=-1) as process:
        try:
            assert process.stdout.readline() == b"x\n"
            who = f"process {process.pid} of the user {psutil.Process(process.pid).username()} (python3 -S -c import"
            why = as_us(lambda: ssh._find_free_nodes([InventoryNode("gpu1", "n1")], 1, None, {}, contextlib.ExitStack())[1])
            assert why.startswith(f"waits for free nodes; gpu1 is used by {who}")
            monkeypatch.setattr(node_task, "MOST_BUSY_S", 0.0)
            with lock.open() as opened, pytest.raises(ShardlabError) as caught:
                node_task._wait_for_lock(opened.fileno())
            assert f"uses this node: {who}" in str(caught.value)
        finally:
            process.kill()
    with files.hold_lock(lock) as descriptor:
        assert node_lock.find_lock_holder(descriptor)[0] == os.geteuid()
    with lock.open() as opened:
        said = f"a process that has ended or is hidden; the lock file belongs to the user id {OTHER}"
        assert node_lock.find_lock_holder(opened.fileno()) == (OTHER, said)
