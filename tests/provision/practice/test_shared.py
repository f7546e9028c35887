"""A folder that practice nodes share with this machine must not give other users more rights. The tests use real mounts in a
separate mount namespace."""

import os
import subprocess
import sys

import pytest
from support_aside import why_not
from support_practice import FILE

from provision.practice import shared
from provision.practice.base import PRACTICE_UID, PracticeNodeError
from provision.providers import virtual
from shardlab.cluster import cluster

WHY = why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")

# Two clusters protect the same folder and then release it. After each step this program prints: the step, the user id that a
# setuid program in the folder runs with, and whether the folder is protected.
STEPS = """
import os, subprocess, sys
from pathlib import Path
from provision.practice import shared

states, folder = Path(sys.argv[1]), Path(sys.argv[2])
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
one, two = states / "one", states / "two"
one.mkdir(); two.mkdir()

def tell(step):
    program = folder / "id"
    subprocess.run(["cp", "/usr/bin/id", program], check=True)
    program.chmod(0o4755)
    words = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", str(program), "-u"]
    said = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    print(step, said, shared.is_protected(folder), flush=True)

shared.protect_folder(one, folder)
print("owner", folder.stat().st_uid)
tell("one")
shared.protect_folder(one, folder)
shared.protect_folder(two, folder)
tell("two")
shared.release_folder(one)
tell("one-gone")
os.mknod(folder / "memory", 0o020666, os.makedev(1, 1))
shared.release_folder(two)
print("left", oct((folder / "id").stat().st_mode), (folder / "memory").exists())
shared.release_folder(two)
tell("bare")
"""


def test_a_setuid_program_in_the_shared_folder_never_has_an_effect(tmp_path):
    states, folder = tmp_path / "states", tmp_path / "not" / "there yet"
    states.mkdir()
    tmp_path.chmod(0o755)
    # Only root can open the folders of pytest, but user 1000 must be able to run the program in the shared folder.
    for parent in tmp_path.parents[:3]:
        if parent.stat().st_uid == os.geteuid() and str(parent) != "/" and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    command = ["unshare", "--mount", sys.executable, "-P", "-c", STEPS, states, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"owner {PRACTICE_UID}",
        "one 1000 True",
        "two 1000 True",
        "one-gone 1000 True",
        "left 0o100755 False",
        "bare 0 False",  # the folder is not protected any more, so a setuid program works
    ]
    assert sorted(path.name for path in states.rglob("*")) == ["one", "two"]


def test_a_note_of_another_boot_unmounts_nothing(tmp_path, monkeypatch):
    """A record of a mount from an earlier boot of this machine is removed, and nothing is unmounted."""
    monkeypatch.setattr(shared, "run_here", lambda argv: pytest.fail(f"ran {argv}"))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "shared").write_text(f"another-boot {tmp_path}\n")
    shared.release_folder(tmp_path / "one")
    assert not (tmp_path / "one" / "shared").exists()


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    monkeypatch.setattr(virtual, "STATE_FOLDER", folder)
    return folder


def test_the_folder_of_nodes_is_made_for_root_alone_and_an_older_one_is_closed(state, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace("SHARED", str(tmp_path / "not-there")))
    described = cluster.load_cluster(file)
    assert virtual._plan_protections(described) == []
    state.mkdir(mode=0o755)
    (change,) = virtual._plan_protections(described)
    assert change.description == f"close {state} to other users of this machine"
    change.call()
    assert state.stat().st_mode & 0o777 == 0o700
    assert virtual._plan_protections(described) == []
    state.rmdir()
    virtual._close_state_folder()
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_nodes_that_is_another_users_is_refused(state):
    state.mkdir()
    os.chown(state, 1000, 1000)
    with pytest.raises(PracticeNodeError, match="owned by the user 1000, who could change the files of practice nodes"):
        virtual._close_state_folder()


def test_nodes_of_a_former_version_get_their_shared_folder_protected(state, tmp_path):
    file = tmp_path / "cluster.yaml"
    folder = tmp_path / "shared"
    file.write_text(FILE.replace("SHARED", str(folder)))
    described = cluster.load_cluster(file)
    folder.mkdir()
    state.mkdir(mode=0o700)
    assert virtual._plan_protections(described) == []  # no node of this cluster exists on this machine
    (state / described.name).mkdir()
    if not shared.is_protected(folder):  # if /tmp itself is mounted with nosuid and nodev, nothing has to be done
        (change,) = virtual._plan_protections(described)
        assert change.description == f"mount {folder} with nosuid,nodev"
