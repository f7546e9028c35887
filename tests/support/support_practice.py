"""A cluster of practice nodes, and functions that run `provision` on it as a user does.

Several clusters of tests may be up at once, also of several sessions. So each cluster takes a number, which is in its name and
in its subnet. `provision` installs the Python environment only in the first of these clusters; the others get a copy of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_e2e import HANG_S
from support_skips import CI

from provision import software
from provision.practice import base, network
from provision.practice.base import PRACTICE_UID, PracticeNodeError
from provision.practice.machine import CGROUP_NAME, STATE_FOLDER, PracticeMachine, find_init_pid
from provision.providers import virtual
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace

try:
    base.check_machine()
    WHY = None
except PracticeNodeError as error:
    WHY = str(error)

FILE = """\
schema: 1
name: test-practice
provider: virtual
nodes:
  - {name: head, roles: [controller]}
  - {name: work1}
  - {name: work2}
lan: {subnet: 10.89.77.0/24, mbps: 1000}
gpus: {type: practice, per_node: 2}
storage: {shared: SHARED}
slurm: {}
ssh: {between_nodes: true}
"""
# A lock file for each number of a cluster. The process whose cluster has the number holds the lock, and loses it when it ends.
NUMBER = "/run/shardlab-test-cluster-{}"
NUMBERS = range(100, 200)  # also the third part of the addresses of a cluster's nodes
# The folder of the Python environments that the first cluster of tests leaves to the other clusters, on the file system of
# their shared folders. A cluster that is up holds the lock USERS; a cluster that installs an environment holds INSTALLER.
ENVIRONMENTS = Path("/srv/shardlab-test-environments")
USERS, INSTALLER = Path("/run/shardlab-test-users"), Path("/run/shardlab-test-installer")
# Copies a Python environment $1 to $2 by hard links. The shared folder $3 of practice nodes is mounted over itself, and hard
# links cannot cross mounts, so this script unmounts the folder in a mount namespace of its own.
COPY = """\
umount "$3" 2> /dev/null || true
mkdir -p "${2%/*}"
rm -rf "$2.part"
cp -al "$1" "$2.part"
mv "$2.part" "$2"
"""
# Makes a copy of the Python environment $1 work in its folder. It gets no source of shardlab: `provision` sends the source.
ADAPT = """\
cd "$1"
old=$(sed -n '1s|^#!\\(.*\\)/bin/python.*|\\1|p' bin/pip)
test "$old"
grep -lI -- "$old" bin/* pyvenv.cfg | xargs sed -i "s|$old|$1|g"
rm -rf source.made source-*
find lib -name shardlab.pth -delete
"""
# Parts of the last message of debootstrap, apt-get or pip when the package archives cannot be reached.
ARCHIVES_ARE_AWAY = (
    "debootstrap failed: E: Failed getting release file", "E: Failed to fetch", "E: Unable to fetch some archives",
    "E: Unable to locate package", "failed: ERROR: No matching distribution found",
    "the apt sources of this machine name no archive",
)  # fmt: skip


def are_archives_away(said: str) -> bool:
    """Whether `provision warm`, which printed this text, failed because the package archives cannot be reached.

    True only if the last line is an error message that contains one of ARCHIVES_ARE_AWAY.
    """
    lines = said.strip().splitlines()
    return bool(lines) and lines[-1].startswith("error: ") and any(words in lines[-1] for words in ARCHIVES_ARE_AWAY)


class Practice:
    """A workspace with a cluster file, and functions that run `provision` there."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder = folder
        self.file = folder / "cluster.yaml"
        self.file.write_text(file.replace("SHARED", str(folder / "shared")))
        self.cluster = cluster.load_cluster(self.file)
        self.nodes = {node.name: node for node in virtual.list_nodes(self.cluster, Workspace(folder))}

    @property
    def shared(self) -> Path:
        return Path(self.cluster.storage.shared)

    def words(self, *words: str) -> list[str]:
        return [str(self.file), *words, "--json", "--workspace", str(self.folder)]

    def start(self, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "provision", *self.words(*words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def provision(self, *words: str, code: int = 0) -> dict:
        process = self.start(*words)
        stdout, stderr = process.communicate(timeout=HANG_S)
        assert process.returncode == code, f"exit {process.returncode}\n{stderr}{bad(stdout)}"
        return json.loads(stdout)

    def verify(self) -> None:
        """Run `provision`, and check that it verified all nodes."""
        assert self.provision()["verified"] is True

    def begin(self) -> None:
        """Run `provision` without the operation that makes the Python environment; so its checks fail."""
        self.provision("--skip", "environment", code=1)

    def machine(self, name: str) -> PracticeMachine:
        return PracticeMachine(self.cluster.name, name, "", 0, "", Path(), "")

    def give_disk(self, name: str, size: str) -> None:
        """Put the files of a node that does not exist yet on a small disk. If the disk exists, change its size."""
        folder = self.machine(name).folder
        folder.mkdir(exist_ok=True)
        options = f"remount,size={size}" if os.path.ismount(folder) else f"size={size}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

    def take_back_disk(self, name: str) -> None:
        """Unmount the node's small disk. This stops and removes the node."""
        machine = self.machine(name)
        if os.path.ismount(machine.folder):
            machine.crash()
            subprocess.run(["umount", "--recursive", machine.folder], check=True)

    def run(self, name: str, script: str, *, root: bool = True) -> str:
        answer = self.nodes[name].run(["sh", "-euc", script], timeout_s=HANG_S, root=root)
        assert answer.code == 0, answer.stderr
        return answer.stdout


def bad(stdout: str) -> str:
    """The operations and checks of a JSON document of `provision` that failed.

    Returns the whole text if the text is not such a document.
    """
    try:
        said = json.loads(stdout)
        operations = [(node["name"], one) for node in said["nodes"] for one in node["operations"]]
        checks = [(one.get("node", ""), one) for one in said["checks"]]
        lines = [f"{node} {one}" for node, one in operations if one["state"] in ("failed", "not reached")]
        return "\n".join([*lines, *(f"{node} {one}" for node, one in checks if one["passed"] is False)])
    except (ValueError, KeyError, TypeError):
        return stdout


def states(said: dict) -> dict:
    """The operations in a JSON document of `provision`, by node name and operation name."""
    return {(node["name"], one["name"]): one for node in said["nodes"] for one in node["operations"]}


def clusters(folder: Path, file: str = FILE, release: str | None = None) -> Iterator[Practice]:
    """A verified cluster of practice nodes with this release of Debian. Everything is removed at the end."""
    with unprovisioned(folder, file, release) as practice, provisioned(practice, practice.verify, practice.begin):
        yield practice


@contextlib.contextmanager
def provisioned(
    practice: Practice, provision: Callable[[], object], begin: Callable[[], object] | None = None
) -> Iterator[None]:
    """Provision a cluster with the function `provision`, and keep its Python environment for other clusters of tests.

    `provision` installs the environment only if no other cluster of tests that is up has it. Otherwise the cluster first gets a
    copy. While another cluster installs the environment, the function `begin` is called, which needs no environment.
    """
    installed = practice.shared / "shardlab" / f"python-{software.compute_packages_digest()}"
    kept = ENVIRONMENTS / (practice.cluster.release or "own") / installed.name
    copy = ["unshare", "--mount", "sh", "-euc", COPY, "copy"]
    remove_unused_environments()  # of a session that was killed
    with lock(USERS, fcntl.LOCK_SH):
        with lock(INSTALLER, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_free:
            pass
        if begin and not is_free:
            begin()
        with lock(INSTALLER, fcntl.LOCK_EX):
            is_kept = kept.exists()
            if is_kept:
                practice.shared.mkdir(exist_ok=True)
                os.chown(practice.shared, PRACTICE_UID, PRACTICE_UID)
                subprocess.run([*copy, kept, installed, practice.shared], check=True)
                subprocess.run(["sh", "-euc", ADAPT, "adapt", installed], check=True)
            else:
                provision()
                subprocess.run([*copy, installed, kept, practice.shared], check=True)
        if is_kept:
            provision()
        yield
    remove_unused_environments()


def remove_unused_environments() -> None:
    """Remove ENVIRONMENTS if no cluster of tests is up."""
    with lock(USERS, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_unused:
        if is_unused:
            shutil.rmtree(ENVIRONMENTS, ignore_errors=True)


@contextlib.contextmanager
def unprovisioned(folder: Path, file: str, release: str | None = None) -> Iterator[Practice]:
    """A cluster whose practice nodes are not booted yet. Everything is removed at the end."""
    with cluster_number() as number:
        yield from _unprovisioned(folder, numbered(file, number) + (f"release: {release}\n" if release else ""))


@contextlib.contextmanager
def cluster_number() -> Iterator[int]:
    """A number that no other cluster of tests on this machine has while the context is open."""
    for number in NUMBERS:
        with lock(Path(NUMBER.format(number)), fcntl.LOCK_EX | fcntl.LOCK_NB) as is_free:
            if is_free:
                yield number
                return
    pytest.fail(f"all numbers of clusters are in use: {NUMBERS}")


def numbered(file: str, number: int) -> str:
    """The text of a cluster file with the number in the name of the cluster and in its subnet."""
    file = re.sub("(?m)^name: .*$", rf"\g<0>-{number}", file)
    return re.sub(r"subnet: 10\.89\.\d+\.", f"subnet: 10.89.{number}.", file)


@contextlib.contextmanager
def lock(file: Path, kind: int) -> Iterator[bool]:
    """Hold a lock while the context is open. Yields whether the lock was free; with LOCK_NB it may be in use."""
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, kind)
        except BlockingIOError:
            yield False
        else:
            yield True


def _unprovisioned(folder: Path, file: str) -> Iterator[Practice]:
    folder.mkdir()
    found = Practice(folder, file)
    name = found.cluster.name
    found.provision("down")
    with found.start("warm") as warm:
        _, why = warm.communicate(timeout=1800)
    if warm.returncode:
        shutil.rmtree(folder)
        if CI or not are_archives_away(why):
            pytest.fail(f"`provision warm` failed:\n{why}")
        pytest.skip(f"no practice nodes here: {why.strip().splitlines()[-1]}")
    try:
        yield found
    finally:
        for node in found.nodes:
            found.take_back_disk(node)
        found.provision("down")
        shutil.rmtree(folder)
        # Only what belongs to this cluster: other clusters of this machine come and go meanwhile.
        assert not (STATE_FOLDER / name).exists()
        assert not network.interface_exists(network.make_bridge_name(name))
        assert find_init_pid(STATE_FOLDER / name / "head" / "upper") is None
        assert name not in Path("/proc/mounts").read_text()
        for mounted in ("", "*/"):
            assert not list(Path("/sys/fs/cgroup").glob(f"{mounted}{CGROUP_NAME}/{name}"))
