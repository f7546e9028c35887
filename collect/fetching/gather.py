"""Gathers the parts of runs on the first node, if each node has its own part of the run's folder (docs/ssh.md).

Each node lists its files with their SHA-256. What is missing here is copied, checked and moved to its place; no file replaces
another file. If one of two logs or files of records is the beginning of the other, the longer one is kept. Files by which the
first node decides the state of a run are taken from no other node. What arrived before an interruption is not copied again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from collect.fetching import manifest
from collect.fetching.manifest import ManifestFile, RunManifest
from collect.fetching.part_manifest import ListedPart
from collect.fetching.transfer import Rsync, has_arrived, put_in_place
from shardlab import files, inventory, part_files, placement, remote_workspace
from shardlab.errors import InputError, ShardlabError
from shardlab.files import NotRegular
from shardlab.inventory import InventoryNode
from shardlab.placement import Placement
from shardlab.remote_workspace import RemoteWorkspace
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace

GATHERED = "gathered"  # an event: nothing is missing
STAGING = ".parts"  # in runs/, so that files take their place by a rename
ASK_S = 3600.0  # a node reads all files of its parts
WAITING = "another collect fetch is gathering the parts of runs; waiting until that command has ended."


def gather(workspace: Workspace, run_ids: Sequence[str], say: Callable[[str], None]) -> dict[str, list[str]]:
    """Gather the parts of the runs that ended and are not complete here. Returns, by run id, a sentence on each part that is
    missing and on each file that contradicts one of this machine. A machine that is not the first node gathers nothing, and
    says so of each run whose parts have not been gathered."""
    is_copy = remote_workspace.known(workspace) is not None
    wanted: dict[str, tuple[str, list[RunDir]]] = {}  # (the cluster, the runs), by node
    sentences: dict[str, list[str]] = {}
    elsewhere: dict[str, list[str]] = {}
    for run in (RunDir(workspace.runs / run_id) for run_id in run_ids):
        if (found := _not_gathered(run)) is None:
            continue
        cluster, placed = found
        if is_copy or placed.first_node != gethostname():
            where = f"the parts of its nodes are gathered on {placed.first_node}, and this machine is another one"
            elsewhere[run.run_id] = [f"{where}; run `collect fetch` on {placed.first_node}"]
            continue
        for node in placed.nodes:
            wanted.setdefault(node, (cluster, []))[1].append(run)
            sentences[run.run_id] = []
    if not wanted:
        return elsewhere
    with files.locked(workspace.own / "gather.lock", lambda _descriptor: say(WAITING)) as lock:
        for name, (cluster, runs) in wanted.items():
            try:
                of_node = _gather_node(workspace, _node(workspace, cluster, name), runs, lock, say)
            except ShardlabError as error:
                of_node = {run.run_id: [f"the part of {name} is missing: {error}"] for run in runs}
            for run_id, of_run in of_node.items():
                sentences[run_id] += of_run
    for run_id, of_run in sentences.items():
        if not of_run:
            RunDir(workspace.runs / run_id).write_event("collect", GATHERED)
    return sentences | elsewhere


def _not_gathered(run: RunDir) -> tuple[str, Placement] | None:
    """(the cluster, the placement) of a run that ended and whose parts have not been gathered; None for any other run."""
    try:
        events = run.events()
        placed = placement.of(events)
        if placed is None or any(event.event == GATHERED for event in events):
            return None
        return (run.read_run().cluster["name"], placed) if run.judge().state in FINAL else None
    except ShardlabError:  # it is reported as a run that cannot be read
        return None


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
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
    sentences: dict[str, list[str]] = {run_id: [] for run_id in ids}
    missing = {run_id: _missing(workspace, part) for run_id, part in parts.items()}
    for run_id, of_run in missing.items():
        refused = [name for name in of_run if part_files.is_of_first_node(name)]
        sentences[run_id] += [f"{name} of {node.name} is not stored: only the first node writes this file" for name in refused]
        missing[run_id] = [name for name in of_run if name not in refused]
    names = [f"{run_id}/{name}" for run_id, of_run in missing.items() for name in of_run]
    lacking = [name for name in names if not _arrived(staging, parts, name)]
    if lacking:
        say(f"{node.name}: {len(lacking):,} files of {len(parts):,} run(s)")
    transfer = Rsync(there, lock).bring("runs", staging, lacking)
    has_all = True
    for run_id in ids:
        if run_id not in parts:
            sentences[run_id].append(f"the part of {node.name} is missing: the node has no folder of this run")
        elif listed[run_id].in_use:
            sentences[run_id].append(f"the part of {node.name} may grow: a process on the node still works in its folder")
    for full in names:
        run_id, _, name = full.partition("/")
        file, run = parts[run_id].files[name], RunDir(workspace.runs / run_id)
        if not has_arrived(staging / run_id, name, file):
            has_all = False
            why = f" (rsync: {transfer.said})" if transfer.said else ""
            sentences[run_id].append(f"{name} of {node.name} did not arrive as the node has it{why}")
        elif why := _place(run, staging / run_id, name, file):
            sentences[run_id].append(f"{name} of {node.name} {why}")
    if has_all:  # else the next command continues with what arrived
        shutil.rmtree(staging, ignore_errors=True)
    return sentences


def _arrived(staging: Path, parts: Mapping[str, RunManifest], full: str) -> bool:
    """Whether an earlier command, which was interrupted, copied this file. full: RUN/NAME."""
    run_id, _, name = full.partition("/")
    return has_arrived(staging / run_id, name, parts[run_id].files[name])


def _missing(workspace: Workspace, part: RunManifest) -> list[str]:
    """The files of a part that this machine does not have with the same content, nor a longer file that begins with it."""
    run = workspace.runs / part.run_id
    names = []
    for name, file in part.files.items():
        try:
            status = manifest.regular(run, name)
            length = file.bytes if part_files.is_growing(name) else None
            if status is None or status.st_size < file.bytes or manifest.digest(run / name, length) != file.sha256:
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
    is_longer = part_files.is_growing(name) and status is not None and part_files.is_beginning(run.path / name, arrived / name)
    if status is not None and not is_longer:
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
