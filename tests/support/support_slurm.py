"""A Slurm cluster of practice nodes. Tests run `jobs` on the controller, or on this machine as a user does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support_e2e import HANG_S, logs, until
from support_trust import make_own

from jobs.slurm import submission
from jobs.slurm.submission import Submission
from provision.practice.machine import PracticeMachine
from shardlab.cluster import cluster
from shardlab.cluster.address import Address
from shardlab.remote import remote_workspace
from shardlab.remote.remote import CommandOutput, Remote
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

# The workload is vgg16-tiny: its ranks need half of the processor time to start, because they do not import transformers.
MATRIX = """\
schema: 1
name: {name}
defaults:
  workload: vgg16-tiny
  global_batch_size: 4
  steps: {steps}
  prove: "off"
  optimizer: {{name: sgd, lr: 0.1}}
{more}
"""
FOREVER = 10**7
RANKS = "for p in /proc/[0-9]*; do grep -qz ^RANK= $p/environ && grep -qz ^trainers $p/cmdline && echo ${p#/proc/}; done; true"
BOOT = """
import sys
from pathlib import Path
from provision.providers import virtual
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace

file, folder, name = sys.argv[1:]
node = next(node for node in virtual.list_nodes(cluster.load_cluster(Path(file)), Workspace(Path(folder))) if node.name == name)
for change in virtual.bring_up(cluster.load_cluster(Path(file)), Workspace(Path(folder)), node):
    change.make(node)
"""


class SlurmCluster:
    """A cluster that `provision` set up from a workspace on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "cluster.yaml"
        self.cluster = cluster.load_cluster(self.file)
        self.shared = Path(self.cluster.storage.shared or "")
        inventory = json.loads((folder / ".shardlab/inventory.json").read_text())
        self.python = inventory["nodes"][0]["python"]
        self.nodes = {
            node["name"]: Remote(
                Address(
                    node["host"],
                    user=node["user"],
                    identity=Path(node["identity"]),
                    known_hosts=folder / ".shardlab/known_hosts",
                )
            )
            for node in inventory["nodes"]
        }

    @property
    def version(self) -> tuple[int, ...]:
        """The version of Slurm, such as (22, 5, 8)."""
        return tuple(map(int, self.run("head", "sinfo --version").split()[1].split(".")))

    def machine(self, name: str) -> PracticeMachine:
        return PracticeMachine(self.cluster.name, name, "", 0, "", Path(), "")

    def boot(self, name: str) -> None:
        """Boot a node that crashed, with the functions of `provision`.

        A process of its own boots the node. The node keeps running when this process ends.
        """
        done = subprocess.run([sys.executable, "-P", "-c", BOOT, self.file, self.folder, name], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def answer(self, node: str, *argv: str, root: bool = False, **options: Any) -> CommandOutput:
        return self.nodes[node].run(argv, timeout_s=HANG_S, root=root, **options)

    def run(self, node: str, script: str, *, root: bool = False) -> str:
        answer = self.answer(node, "sh", "-euc", script, root=root)
        assert answer.code == 0, f"exit {answer.code}\n{answer.stderr}{answer.stdout}"
        return answer.stdout

    @contextlib.contextmanager
    def without_slurmctld(self, at_least_s: float) -> Iterator[None]:
        """Stop slurmctld during the block, for at least this many seconds. Then start it and wait until it answers."""
        self.run("head", "systemctl stop slurmctld", root=True)
        ends = time.monotonic() + at_least_s
        try:
            yield
            time.sleep(max(0.0, ends - time.monotonic()))
        finally:
            self.run("head", "systemctl start slurmctld; until scontrol ping | grep -q UP; do sleep 0.5; done", root=True)

    @contextlib.contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """Add these lines to the configuration of Slurm during the block."""
        conf = "/etc/slurm/slurm.conf"
        ready = "scontrol ping | grep -q UP && ! sinfo -h -N -o %T | grep -qiE 'unk|\\*'"  # also waits for the workers
        again = f"systemctl restart slurmctld; until {ready}; do sleep 0.5; done"
        added = shlex.join(["printf", "%s\\n", *lines])
        try:
            self.run("head", f"cp -p {conf} {conf}.before; {added} >> {conf}; {again}", root=True)
            yield
        finally:
            self.run("head", f"mv {conf}.before {conf}; {again}", root=True)

    @contextlib.contextmanager
    def frozen_ranks(self, node: str) -> Iterator[None]:
        """Stop the ranks on a node during the block, as soon as they exist; they continue afterwards."""
        found = self.run(node, f'ranks() {{ {RANKS}; }}; until [ -n "$(ranks)" ]; do sleep 0.1; done; ranks').split()
        self.run(node, f"kill -STOP {' '.join(found)}")
        try:
            yield
        finally:
            self.run(node, f"kill -CONT {' '.join(found)}")

    def idle(self, *names: str) -> bool:
        said = self.run("head", "sinfo -h -N -o '%N %T'").split("\n")
        return {f"{name} idle" for name in names or ("work1", "work2")} <= set(said)


class Study:
    """A workspace on the cluster's shared folder. Its `jobs` commands run on the controller."""

    def __init__(self, slurm: SlurmCluster, path: Path) -> None:
        self.slurm, self.path = slurm, path

    @classmethod
    def new(cls, slurm: SlurmCluster, name: str, more: str = "") -> Study:
        """Make the workspace.

        more: the keys below `slurm` in its cluster file.
        """
        study = cls(slurm, slurm.shared / "studies" / name)
        study.write("cluster.yaml", slurm.file.read_text().replace("slurm: {}", f"slurm: {{{more}}}"))
        return study

    def write(self, name: str, text: str) -> str:
        """Write a file of the workspace as the user on the controller; returns its path."""
        path = self.path / name
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        done = self.slurm.answer("head", "sh", "-c", script, "write", str(path), stdin=text.encode())
        assert done.code == 0, done.stderr
        return str(path)

    def begin(self) -> None:
        """Let the workspace begin, as the first command of its user does: later files are then the user's own."""
        code = "import sys, pathlib\nfrom shardlab.workspace import workspace, workspace_trust\n"
        code += "workspace_trust.begin_workspace(workspace.Workspace(pathlib.Path(sys.argv[1])))"
        done = self.slurm.answer("head", self.slurm.python, "-P", "-c", code, str(self.path))
        assert done.code == 0, done.stderr

    def stand_in(self, command: str, script: str) -> dict[str, str]:
        """Replace one of Slurm's commands by a shell script. Returns the environment that a command needs to use the script."""
        path = self.write(f"bin/{command}", f"#!/bin/sh\n{script}\n")
        self.slurm.answer("head", "chmod", "+x", path)
        return {"PATH": f"{self.path}/bin:/usr/bin:/bin"}

    def matrix(self, more: str, *, steps: int = 3, name: str = "small") -> str:
        return self.write(f"{name}.yaml", MATRIX.format(name=name, steps=steps, more=more))

    def start(self, *words: str, env: dict[str, str] | None = None) -> CommandOutput:
        argv = [self.slurm.python, "-P", "-m", "jobs", *words, "--workspace", str(self.path)]
        return self.slurm.nodes["head"].run(argv, timeout_s=HANG_S, env=env)

    def jobs(self, *words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        answer = self.start(*words, env=env)
        assert answer.code == code, f"{words}: exit {answer.code}\n{answer.stdout}\n{answer.stderr}\n{self.logs()}"
        return answer.stdout

    def json(self, *words: str, code: int = 0, env: dict[str, str] | None = None) -> Any:
        return json.loads(self.jobs(*words, "--json", code=code, env=env))

    def runs(self, **options: Any) -> list[dict[str, Any]]:
        return self.json("status", **options)["runs"]

    def states(self) -> list[str]:
        return [run["state"] for run in self.runs()]

    def folders(self) -> list[RunDir]:
        return [RunDir(path.parent) for path in sorted((self.path / "runs").glob("[!.]*/run.json"))]

    def events(self, name: str) -> list[Any]:
        return [event for folder in self.folders() for event in folder.read_events() if event.event == name]

    def submissions(self) -> list[Submission]:
        return submission.list_submissions(Workspace(self.path))

    def queue(self) -> list[str]:
        """The names of this user's jobs that wait or run in Slurm. All jobs of a job array have the same name."""
        return self.slurm.run("head", "squeue -h --me -o %j").split()

    def logs(self) -> str:
        files = sorted([*self.path.glob("runs/*/log/*.log"), *self.path.glob("**/slurm-*.out")])
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in files)

    def until(self, true: Callable[[], Any], what: str, limit_s: float = 240.0) -> Any:
        try:
            return until(true, what, limit_s, least_pause_s=1.0)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.start('status').stdout}\n{self.logs()}") from None

    def end(self) -> None:
        self.start("cancel", "--all")


@contextlib.contextmanager
def studies(slurm: SlurmCluster, test: str) -> Iterator[Callable[..., Study]]:
    """A function that makes workspaces for a test, with the arguments `more` and `suffix`. Their runs are ended at the end."""
    made: list[Study] = []
    # The names of workspaces have at most 45 characters of the names of their tests. This suffix keeps two workspaces apart
    # whose tests' names begin alike.
    its_own = hashlib.sha256(test.encode()).hexdigest()[:6]

    def make(more: str = "", suffix: str = "") -> Study:
        made.append(Study.new(slurm, f"{test[5:50]}-{its_own}-{os.getpid()}{suffix}", more))
        return made[-1]

    yield make
    for one in made:
        one.end()


class Desk:
    """A workspace on this machine, from which a user works on the cluster."""

    def __init__(self, slurm: SlurmCluster, folder: Path, before: Sequence[str] = ()) -> None:
        """before: words that are put before the words of each command, such as `env NAME=VALUE`."""
        self.slurm, self.path, self.before = slurm, folder, before
        own = make_own(folder).shardlab_folder
        (folder / "cluster.yaml").write_text(slurm.file.read_text())
        for name in ("inventory.json", "known_hosts"):
            (own / name).write_bytes((slurm.folder / ".shardlab" / name).read_bytes())

    def leave_slurm_out(self) -> None:
        """Remove the key `slurm` from the cluster file: runs are then started over SSH, on the same nodes."""
        file = self.path / "cluster.yaml"
        file.write_text(re.sub(r"^slurm: .*\n", "", self.slurm.file.read_text(), flags=re.MULTILINE))

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.end(self.start(*words), code=code)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [*self.before, sys.executable, "-P", "-m", *words, "--workspace", str(self.path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, process: subprocess.Popen[str], *, code: int = 0) -> subprocess.CompletedProcess[str]:
        stdout, stderr = process.communicate(timeout=HANG_S)
        where = logs(self.slurm.shared) if process.returncode != code else ""
        assert process.returncode == code, f"{process.args}: exit {process.returncode}\n{stdout}\n{stderr}\n{where}"
        return subprocess.CompletedProcess(process.args, code, stdout, stderr)

    def twin(self) -> Study:
        """The workspace on the cluster in which the runs of the user's workspace are stored."""
        found = remote_workspace.read_remote_workspace(Workspace(self.path))
        assert found is not None
        return Study(self.slurm, Path(found.workspace))
