"""Nodes without Slurm, all of which are this machine: a stand-in of `ssh` runs the command of a login here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import psutil
from support_cells import CELL
from support_e2e import HANG_S, until
from support_trust import make_own

from jobs.node import node_processes
from jobs.node.rendezvous import NODES_VARIABLE
from jobs.run_queue import RunQueue
from jobs.ssh import node_lock
from shardlab.files import files
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir

# The stand-in of `ssh`. With the option -G, it calls the real client. If a file is named after the address of a node, the login
# to this node fails, and the text of the file is the error message.
SSH = """#!/bin/sh
for word; do
  case $word in -G) exec /usr/bin/ssh "$@";; esac
done
while test $# -gt 2; do
  case $1 in -E) log=$2;; --) host=$2;; esac
  shift
done
test "$1" = -- && host=$2
test -f BROKEN/"$host" && { cat BROKEN/"$host" >> "$log"; exit 255; }
exec env -i HOME="$HOME" PATH="$PATH" PYTHONPATH="$PYTHONPATH" sh -c "$2"
"""
# Each node has its own host name. The node gpu0 has the workspace; every other node has its own folder at the workspace's path.
SSH_APART = """#!/bin/sh
for word; do test "$word" != -G || exec /usr/bin/ssh "$@"; done
while :; do case $1 in -E) log=$2; shift 2;; -o | -i | -p | -l) shift 2;; --) shift; break;; -*) shift;; *) break;; esac; done
host=$1; shift
test "$1" != -- || shift
test -f BROKEN/"$host" && { if test "$log"; then cat BROKEN/"$host" >> "$log"; else cat BROKEN/"$host" >&2; fi; exit 255; }
test ! -f BROKEN/"$host".greeting || echo welcome
name=$(cat NAMES/"$host")
set -- env -i HOME="$HOME" PATH="$PATH" PYTHONPATH="$PYTHONPATH":WORKSPACE/packages sh -c "$*"
test "$name" != gpu0 || exec "$@"
exec unshare --mount --uts --propagation private sh -c '
  hostname "$1" && mount --bind "$2" "$3" && cd / && shift 3 && exec "$@"' node "$name" ROOTS/"$name" WORKSPACE "$@"
"""
# Put before the stand-in of `ssh`. A login for a transfer of files runs SCRIPT, in which REAL is the stand-in itself.
TRANSFERS = """#!/bin/sh
for last; do test "$last" != -G || exec /usr/bin/ssh "$@"; done
command=$(echo "$last" | sed -n 's/.*echo \\([A-Za-z0-9+/=]*\\) | base64.*/\\1/p' | base64 -d)
case $command in *shardlab.transfer.node_files*) ;; *) exec REAL "$@";; esac
SCRIPT
"""


class SshNodes:
    """A workspace on the first node of a cluster. The nodes are called gpu0, gpu1 and so on."""

    def __init__(self, folder: Path, monkeypatch: Any, *, apart: Path | None = None, count: int = 2) -> None:
        """Make the workspace.

        apart: a folder for the nodes' own disks. If None, all nodes share the workspace. count: the number of nodes.
        """
        self.workspace = make_own(folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.broken = folder / "broken"
        for path in (self.broken, self.workspace.shardlab_folder, folder / "bin"):
            path.mkdir(exist_ok=True)
        # The file locks of nodes are named after addresses, so each test process uses its own addresses.
        self.hosts = {f"gpu{node}": f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.{node + 2}" for node in range(count)}
        nodes = [
            {"name": name, "host": host, "roles": ["worker"], "python": sys.executable} for name, host in self.hosts.items()
        ]
        (self.workspace.shardlab_folder / "inventory.json").write_text(
            json.dumps({"schema": 1, "cluster": "c", "nodes": nodes})
        )
        script = SSH
        self.apart = apart
        if apart is not None:
            for name, host in self.hosts.items():
                (apart / name).mkdir(parents=True)
                (apart / host).write_text(name)
            script = SSH_APART.replace("NAMES", quote(str(apart))).replace("ROOTS", quote(str(apart)))
            script = script.replace("WORKSPACE", quote(str(folder)))
        (folder / "bin/ssh").write_text(script.replace("BROKEN", quote(str(self.broken))))
        (folder / "bin/ssh").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
        monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))

    def part(self, node: str, folder: RunDir) -> RunDir:
        """The folder of a run on a node that has its own disk."""
        assert self.apart is not None
        return RunDir(self.apart / node / "runs" / folder.run_id)

    def break_login(self, node: str, words: str) -> None:
        (self.broken / self.hosts[node]).write_text(f"{words}\n")

    def replace_transfers(self, script: str) -> None:
        """Run a shell script in place of `ssh` if files are sent to a node, or asked for. In it, `REAL "$@"` is the login."""
        ssh, real = self.workspace.path / "bin/ssh", self.workspace.path / "bin/real-ssh"
        if not real.exists():
            ssh.rename(real)
        ssh.write_text(TRANSFERS.replace("SCRIPT", script).replace("REAL", quote(str(real))))
        ssh.chmod(0o755)

    def greet(self, node: str) -> None:
        """Make a node print a line at each login, as a ~/.bashrc can do. Only for nodes with their own disks."""
        (self.broken / f"{self.hosts[node]}.greeting").touch()

    def mend_login(self, node: str) -> None:
        (self.broken / self.hosts[node]).unlink()

    def run(self, repeat: int, nnodes: int, script: str, **changed: Any) -> RunDir:
        """Make a rendered run.

        repeat: the number of the repeat. script: a shell executes it on each node. changed: keys of run.json that differ.
        """
        folder = RunDir(self.workspace.runs / make_run_id(CELL, repeat))
        folder.log.mkdir(parents=True)
        run = Run(
            schema=1, run_id=folder.run_id, matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=repeat, attempt=1,
            launcher="fork", rehearsal=True, world=World(nnodes, 2, 2 * nnodes), cluster={"name": "c", "provider": "ssh"},
            data_path="", versions={}, git_commit=None, templates={}, created="", scheduler="ssh",
            separate_folders=self.apart is not None,
        )  # fmt: skip
        files.write_json(folder.run_json, {**json.loads(files.encode_json(run)), **changed})
        (folder.path / "task").write_text(script)
        python = sys.executable
        command = f"{python} -m jobs.supervisor.attempt . -- {python} -m jobs.ssh.step . -- sh task"
        (folder.path / "job.sh").write_text(f"cd {quote(str(folder.path))}\nexport OF_SCRIPT=yes\nexec {command}\n")
        folder.write_event("controller", "rendered")
        return folder

    def attempt(self, folder: RunDir, nodes: str) -> subprocess.Popen[bytes]:
        """Start the job script of a run, as the runner does. nodes: the value of the environment variable NODES."""
        return self._start(["bash", str(folder.path / "job.sh")], {**os.environ, NODES_VARIABLE: nodes})

    def submit(self, *folders: RunDir) -> RunQueue:
        """Submit runs, and start a runner as a child of this process, which `end` waits for."""
        for folder in folders:
            folder.write_event("controller", "submitted", scheduler="ssh")
        self.start_runner()
        return RunQueue("ssh", self.workspace)

    def start_runner(self) -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-P", "-m", "jobs.schedulers.ssh", str(self.workspace.path)], dict(os.environ))

    def _start(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._processes.append(subprocess.Popen(words, env=environment))
        return self._processes[-1]

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(HANG_S)
        for host in self.hosts.values():
            for kind in ("node", "run"):
                (node_lock.LOCK_FOLDER / f"shardlab-{kind}-{host}.lock").unlink(missing_ok=True)


def wait_for(folder: RunDir, name: str) -> None:
    until(lambda: any(event.event == name for event in folder.read_events()), f"{folder.run_id}: {name}")


def tasks(folder: RunDir) -> list[psutil.Process]:
    """The processes that were started by the tasks of a run."""
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(node_processes.RUN_MARK_VARIABLE, "").startswith(f"{folder.path}#"):
                marked.append(process)
        except psutil.Error:
            continue
    return marked
