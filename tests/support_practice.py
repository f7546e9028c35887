"""A cluster of practice nodes, and functions that run `provision` on it as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_e2e import HANG_S
from support_skips import CI

from provision.practice import base, network
from provision.practice.base import NoBase
from provision.practice.machine import CGROUP, STATE, PracticeMachine, init_of
from provision.providers import virtual
from shardlab import cluster
from shardlab.workspace import Workspace

try:
    base.check()
    WHY = None
except NoBase as error:
    WHY = str(error)

NAME = "test-practice"
FILE = f"""\
schema: 1
name: {NAME}
provider: virtual
nodes:
  - {{name: head, roles: [controller]}}
  - {{name: work1}}
  - {{name: work2}}
lan: {{subnet: 10.89.77.0/24, mbps: 1000}}
gpus: {{type: practice, per_node: 2}}
storage: {{shared: SHARED}}
slurm: {{}}
ssh: {{between_nodes: true}}
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
        self.cluster = cluster.load(self.file)
        self.nodes = {node.name: node for node in virtual.nodes(self.cluster, Workspace(folder))}

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
    with unprovisioned(folder, file, release) as found:
        said = found.provision()
        assert said["verified"] is True
        yield found


@contextlib.contextmanager
def unprovisioned(folder: Path, file: str, release: str | None = None) -> Iterator[Practice]:
    """A cluster whose practice nodes are not booted yet. Everything is removed at the end."""
    folder.mkdir()
    found = Practice(folder, file + (f"release: {release}\n" if release else ""))
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
        assert not (STATE / name).exists()
        assert not network.is_up(network.bridge(name))
        assert init_of(STATE / name / "head" / "upper") is None
        assert name not in Path("/proc/mounts").read_text()
        for mounted in ("", "*/"):
            assert not list(Path("/sys/fs/cgroup").glob(f"{mounted}{CGROUP}/{name}"))
