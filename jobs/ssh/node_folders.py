"""Sends what the ranks of a run need to its nodes if the nodes share no folder: each has its own part of the run's folder.

The parts have the same path on every node. The first node has the claim, with a random text in it; so a node whose folder has
this text is the first node itself.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

import msgspec

from jobs.ssh.node_task import TOKEN
from jobs.ssh.step import Lost, last_line, login
from shardlab import checkpoint, files, inventory, own_workload, placement
from shardlab.checkpoint import CheckpointManifest
from shardlab.errors import ShardlabError
from shardlab.inventory import InventoryNode
from shardlab.remote import Address, rsync_words
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

ANSWER_S = 60.0
SILENT_S = 60  # rsync gives up a connection that is silent for so long
LOOK_S = 0.1
BROKEN = (10, 12, 30, 35, 255)  # exit codes of rsync if the connection to the node failed or broke
# Prints `own` on the first node. On other nodes, sets aside the part of an earlier run of this name.
PREPARE = """\
if test "$(cat "$1/$2" 2>/dev/null)" = "$3"; then echo own; exit; fi
if test -e "$1"; then mv -T -- "$1" "$(dirname "$1")/.$(basename "$1").$3.old"; fi
mkdir -p -- "$1/log" "$4"
"""

Told = Callable[[], bool]


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint from which a run resumes."""

    run: RunDir
    path: Path
    manifest: CheckpointManifest

    def missing(self) -> list[str]:
        """The names of its files that are not on this machine."""
        return [file.name for file in self.manifest.files if _size(self.path / file.name) != file.bytes]


def send(folder: RunDir, run: Run, nodes: Sequence[InventoryNode], told: Told) -> None:
    """Send the run's files to each of its nodes, and the checkpoint from which it resumes. told: whether the run shall end,
    which ends the transfers.

    Raises Lost if a node does not answer, ShardlabError if a node cannot store the files or the checkpoint is not complete.
    """
    workspace = Workspace(folder.path.parent.parent)
    token = secrets.token_hex(8)
    files.write_new(folder.path / TOKEN, token.encode())
    saved = _saved(workspace, run)
    if saved is not None:
        _gather(workspace, run, saved, told)
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        for sent in [pool.submit(_send, workspace, folder, run, node, token, saved, told) for node in nodes]:
            sent.result()


def _send(
    workspace: Workspace, folder: RunDir, run: Run, node: InventoryNode, token: str, saved: StoredCheckpoint | None, told: Told
) -> None:
    if _prepare(workspace, folder, node, token):
        return
    own = [f"runs/{folder.run_id}/{name}" for name in files.names(folder.path) if _is_rendered(folder.path / name)]
    source = [os.path.relpath(run.source, workspace.path)] if run.source is not None else []
    _transfer(node, workspace, [*own, *source], told)
    if saved is not None:
        old = f"runs/{saved.run.run_id}"
        events = [name for name in files.names(saved.run.path) if name.startswith("events.")]
        names = ["run.json", *events, "steps", str(saved.path.relative_to(saved.run.path))]
        # What the node wrote itself is never replaced by a copy.
        _transfer(node, workspace, [f"{old}/{name}" for name in names], told, "--ignore-existing")


def _prepare(workspace: Workspace, folder: RunDir, node: InventoryNode, token: str) -> bool:
    """Make the folders of a node's part; True if the node is the first node, which has them."""
    log = folder.log / f"ssh.{node.name}.log"
    words = ["sh", "-euc", PREPARE, "prepare", str(folder.path), TOKEN, token, str(workspace.own)]
    argv = [*login(node, log), shlex.join(words)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise Lost(node.name, f"did not answer within {ANSWER_S:g} s") from None
    if done.returncode == 255:
        raise Lost(node.name, last_line(log) or "the connection broke")
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ShardlabError(
            f"{node.name}: cannot make the folder {folder.path} ({said[-1] if said else f'exit code {done.returncode}'}). "
            "`provision` makes the folder of the workspaces on each node."
        )
    return done.stdout.split() == ["own"]


def _is_rendered(path: Path) -> bool:
    """Whether a file of the run's folder was there before the run started."""
    return (path.is_file() and not path.name.startswith((".", "events."))) or path.name == own_workload.FOLDER


def _saved(workspace: Workspace, run: Run) -> StoredCheckpoint | None:
    """The newest checkpoint of the runs to resume from, as far as this machine knows it."""
    for name in run.resume:
        old = RunDir(workspace.runs / name)
        for path in checkpoint.whole(old.path):
            if isinstance(manifest := checkpoint.read(path), CheckpointManifest):
                return StoredCheckpoint(old, path, manifest)
    return None


def _gather(workspace: Workspace, run: Run, saved: StoredCheckpoint, told: Told) -> None:
    """Get the parts of a checkpoint from the nodes that wrote it. Raises ShardlabError if one is missing."""
    placed = placement.of(saved.run.events())
    known = {node.name: node for node in inventory.read(workspace, run.cluster["name"]).nodes}
    absent = []
    for name in placed.nodes if placed is not None else ():
        if not (missing := saved.missing()):
            return
        names = [str((saved.path / file).relative_to(workspace.path)) for file in missing]
        try:
            if name not in known:
                raise Lost(name, "the inventory does not list it any more")
            _transfer(known[name], workspace, names, told, "--ignore-missing-args", back=True)
        except Lost as lost:
            absent.append(str(lost))
    if (missing := saved.missing()) and not told():
        why = "; ".join(absent) or "the nodes do not have them any more"
        raise ShardlabError(
            f"cannot resume from the checkpoint at step {saved.manifest.step} of {saved.run.run_id}: {len(missing)} of its "
            f"{len(saved.manifest.files)} files are missing ({why}). Run `jobs retry` again when the node answers."
        )


def _transfer(
    node: InventoryNode, workspace: Workspace, names: Sequence[str], told: Told, *options: str, back: bool = False
) -> None:
    """Copy files and folders of the workspace to a node, or from it; ends early if `told`. Raises Lost and ShardlabError."""
    if shutil.which("rsync") is None:
        raise ShardlabError(f"{gethostname()}: rsync is not installed, which sends the run to its nodes: apt install rsync.")
    host, shell = rsync_words(Address(node.host, node.port, node.user))
    ends = [f"{workspace.path}/", f"{host}:{workspace.path}/"]
    argv = ["rsync", "--archive", "--recursive", "--from0", "--files-from=-", f"--timeout={SILENT_S}", shell, *options]
    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
        listed.write("".join(f"{name}\0" for name in names).encode())
        listed.seek(0)
        process = subprocess.Popen(
            [*argv, *(reversed(ends) if back else ends)], stdin=listed, stdout=subprocess.DEVNULL, stderr=errors
        )
        while (code := process.poll()) is None:
            if told():
                process.terminate()
                process.wait()
                return
            time.sleep(LOOK_S)
        errors.seek(0)
        said = next(iter(errors.read().decode("utf-8", "replace").strip().splitlines()), f"rsync: exit code {code}")
    if code in BROKEN:
        raise Lost(node.name, said)
    if code:
        raise ShardlabError(f"{node.name}: {said}.")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
