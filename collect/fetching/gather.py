"""Gathers the parts of runs on the first node, if each node has its own part of the run's folder (docs/ssh.md).

Each node lists its files with their SHA-256. What is missing here is copied, checked and moved to its place; no file replaces
another file, except that the whole of a log or of records replaces its beginning.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from collect.fetching import manifest
from collect.fetching.manifest import ManifestFile, RunManifest
from collect.fetching.part_manifest import ListedPart
from collect.fetching.transfer import Rsync, has_arrived, put_in_place
from shardlab import files, inventory, placement, remote_workspace
from shardlab.errors import InputError, ShardlabError
from shardlab.files import NotRegular
from shardlab.inventory import InventoryNode
from shardlab.remote_workspace import RemoteWorkspace
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace

GATHERED = "gathered"  # an event: nothing is missing
STAGING = ".parts"  # in runs/, so that files take their place by a rename
ASK_S = 3600.0  # a node reads all files of its parts
GROWING = (".jsonl", ".log")  # files that are appended to, of which this machine may have the beginning
WAITING = "another collect fetch is gathering the parts of runs; waiting until that command has ended."


def gather(workspace: Workspace, run_ids: Sequence[str], say: Callable[[str], None]) -> dict[str, list[str]]:
    """Gather the parts of the runs that ended and are not complete here. Returns, by run id, a sentence on each part that is
    missing and on each file that contradicts one of this machine. Does nothing on a machine that is not the first node."""
    if remote_workspace.known(workspace) is not None:
        return {}
    wanted: dict[str, tuple[str, list[RunDir]]] = {}  # (the cluster, the runs), by node
    sentences: dict[str, list[str]] = {}
    for run in (RunDir(workspace.runs / run_id) for run_id in run_ids):
        for cluster, node in _nodes(run):
            wanted.setdefault(node, (cluster, []))[1].append(run)
            sentences[run.run_id] = []
    if not wanted:
        return {}
    with files.locked(workspace.own / "gather.lock", lambda _descriptor: say(WAITING)) as lock:
        for name, (cluster, runs) in wanted.items():
            try:
                found = _gather_node(workspace, _node(workspace, cluster, name), runs, lock, say)
            except ShardlabError as error:
                found = {run.run_id: [f"the part of {name} is missing: {error}"] for run in runs}
            for run_id, of_run in found.items():
                sentences[run_id] += of_run
    for run_id, of_run in sentences.items():
        if not of_run:
            RunDir(workspace.runs / run_id).write_event("collect", GATHERED)
    return sentences


def _nodes(run: RunDir) -> list[tuple[str, str]]:
    """(the cluster, the name) of each node whose part has to be gathered for a run."""
    try:
        events = run.events()
        placed = placement.of(events)
        if placed is None or placed.first_node != gethostname() or any(event.event == GATHERED for event in events):
            return []
        return [(run.read_run().cluster["name"], name) for name in placed.nodes] if run.judge().state in FINAL else []
    except ShardlabError:  # it is reported as a run that cannot be read
        return []


def _node(workspace: Workspace, cluster: str, name: str) -> InventoryNode:
    """The node of this name. Raises InputError."""
    node = next((node for node in inventory.read(workspace, cluster).nodes if node.name == name), None)
    if node is None or node.python is None:
        raise InputError(f"{inventory.path_of(workspace)}: lists no node {name} with shardlab.")
    return node


def _gather_node(
    workspace: Workspace, node: InventoryNode, runs: Sequence[RunDir], lock: int, say: Callable[[str], None]
) -> dict[str, list[str]]:
    """Gather the parts of one node. Raises ShardlabError if it does not answer."""
    there = _workspace_on(workspace, node)
    ids = [run.run_id for run in runs]
    asked = msgspec.json.encode(ids)
    found = there.ask("collect.fetching.part_manifest", [], list[ListedPart], given=asked, limit_s=ASK_S)
    listed = {part.manifest.run_id: part for part in found if part.manifest.run_id in ids}
    parts = {run_id: part.manifest for run_id, part in listed.items()}
    for run_id, part in parts.items():
        manifest.check_received(part, run_id)
    staging = workspace.runs / STAGING / node.name
    with files.as_workspace_error("write"):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True, mode=0o700)
    names = [f"{run_id}/{name}" for run_id, part in parts.items() for name in _missing(workspace, part)]
    if names:
        say(f"{node.name}: {len(names):,} files of {len(parts):,} run(s)")
    transfer = Rsync(there, lock).bring("runs", staging, names)
    sentences: dict[str, list[str]] = {run_id: [] for run_id in ids}
    for run_id in ids:
        if run_id not in parts:
            sentences[run_id].append(f"the part of {node.name} is missing: the node has no folder of this run")
        elif listed[run_id].in_use:
            sentences[run_id].append(f"the part of {node.name} may grow: a process on the node still works in its folder")
    for full in names:
        run_id, _, name = full.partition("/")
        file, run = parts[run_id].files[name], RunDir(workspace.runs / run_id)
        if not has_arrived(staging / run_id, name, file):
            why = f" (rsync: {transfer.said})" if transfer.said else ""
            sentences[run_id].append(f"{name} of {node.name} did not arrive as the node has it{why}")
        elif why := _place(run, staging / run_id, name, file):
            sentences[run_id].append(f"{name} of {node.name} {why}")
    shutil.rmtree(staging, ignore_errors=True)
    return sentences


def _missing(workspace: Workspace, part: RunManifest) -> list[str]:
    """The files of a part that this machine does not have with the same content."""
    run = workspace.runs / part.run_id
    names = []
    for name, file in part.files.items():
        try:
            status = manifest.regular(run, name)
            if status is None or manifest.digest(run / name) != file.sha256:
                names.append(name)
        except NotRegular:
            names.append(name)
    return names


def _place(run: RunDir, arrived: Path, name: str, file: ManifestFile) -> str:
    """Move a file that arrived to its place. Returns why not, as the rest of a sentence, or ''."""
    try:
        status = manifest.regular(run.path, name)
    except NotRegular as error:
        return f"is not stored: {error.filename} is {error.kind}"
    if status is not None:
        is_longer = name.endswith(GROWING) and status.st_size < file.bytes
        if not (is_longer and manifest.digest(arrived / name, status.st_size) == manifest.digest(run.path / name)):
            return "is not stored: the file of this name on the first node has other content"
    with files.as_workspace_error("write"):
        put_in_place(arrived / name, run.path / name, file)
    return ""


def _workspace_on(workspace: Workspace, node: InventoryNode) -> RemoteWorkspace:
    """This workspace's twin on a node, under the same path."""
    assert node.python is not None
    return RemoteWorkspace(
        schema=1,
        cluster="",
        host=node.host,
        port=node.port,
        user=node.user,
        identity=None,
        known_hosts=str(Path("~/.ssh/known_hosts").expanduser()),
        host_keys="strict",
        python=node.python,
        workspace=str(workspace.path),
        mark=node.name,
    )
