"""Gathers the parts of runs on the first node, if each node has its own part of the run folder (docs/ssh.md).

Each node lists its files with their SHA-256. Files that are missing on the first node are copied, checked, and moved into the
run folder. An existing file is not replaced, with one exception: if the first node has only the beginning of a log or a file of
records, the longer file of the other node replaces it. Files from which the first node derives the state of a run are never
taken from other nodes. After an interruption, files that have already arrived are not copied again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

import msgspec

from collect.fetching.part_manifest import ListedPart
from collect.fetching.progress import TransferProgress
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.files.files import NotRegular
from shardlab.remote import remote_workspace
from shardlab.remote.remote_conversation import RemoteConversation
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.runs import part_files, placement
from shardlab.runs.placement import Placement
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES
from shardlab.transfer import manifest
from shardlab.transfer.arrival import HeldCopy, RunReceiver
from shardlab.transfer.manifest import ManifestFile, RunManifest
from shardlab.transfer.messages import AskedFiles, HeldFile
from shardlab.workspace import inventory, workspace_trust
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

GATHERED_EVENT = "gathered"  # name of the event that is written when all parts of a run are on the first node
STAGING_FOLDER = ".parts"  # the staging folder; it lies in runs/, so that a file can be moved into its run folder by a rename
MOST_NODES_AT_ONCE = 16  # the most nodes that are asked at the same time
ANSWER_LIMIT_S = 3600.0  # time limit for the answer of a node, which reads all files of its parts
WAITING_REMARK = "another collect fetch is gathering the parts of runs; waiting until that command has ended."


class NodeParts(msgspec.Struct):
    """The parts of runs that one node has. A file is named RUN_ID/NAME."""

    node: str
    remote_workspace: RemoteWorkspace | None
    """The workspace on the node; None: the node did not answer."""
    sentences_by_run: list[tuple[str, list[str]]]
    """(run id, sentences about the node's part of this run, as `gather` returns them)."""
    manifests: dict[str, RunManifest] = {}
    """Run id -> the files of the node's part."""
    missing: list[str] = []
    """Files of the node's parts that are not on this machine."""
    copied: list[str] = []
    """The files of `missing` that are copied from this node."""
    arrived: set[str] = set()
    """The files of `copied` whose copy is equal to the file on the node."""
    transfer_error: str = ""
    """Why the transfer from this node failed, or ended early; empty if it did not."""

    def get_file(self, run_path: str) -> ManifestFile:
        """The size and the digest that a file has on the node. run_path: RUN_ID/NAME of the file."""
        run_id, _, file_name = run_path.partition("/")
        return self.manifests[run_id].files[file_name]


def gather_parts(workspace: Workspace, run_ids: Sequence[str], progress: TransferProgress) -> dict[str, list[str]]:
    """Gather the parts of these runs. Skipped are runs that have not ended, and runs whose parts have already been gathered.

    Returns {run id: sentences}: one sentence for each part that is missing, and for each file that differs from the same file
    on this machine. If this machine is not the first node of a run, nothing is gathered for the run, and the sentence names the
    first node.
    """
    is_workspace_copy = remote_workspace.read_remote_workspace(workspace) is not None
    # Name of a node -> (name of its cluster, runs of which it has a part).
    runs_by_node: dict[str, tuple[str, list[RunDir]]] = {}
    sentences_by_run: dict[str, list[str]] = {}
    refusals_by_run: dict[str, list[str]] = {}
    for run_dir in (RunDir(workspace.runs / run_id) for run_id in run_ids):
        if (cluster_and_placement := _find_ungathered_placement(run_dir)) is None:
            continue
        cluster_name, run_placement = cluster_and_placement
        if is_workspace_copy or run_placement.first_node != gethostname():
            refusal_text = f"the parts of its nodes are gathered on {run_placement.first_node}, and this machine is another one"
            refusals_by_run[run_dir.run_id] = [f"{refusal_text}; run `collect fetch` on {run_placement.first_node}"]
            continue
        for node in run_placement.nodes:
            runs_by_node.setdefault(node, (cluster_name, []))[1].append(run_dir)
            sentences_by_run[run_dir.run_id] = []
    if not runs_by_node:
        return refusals_by_run
    workspace_trust.must_be_allowed(workspace, f"log in to {', '.join(runs_by_node)}")
    with files.hold_lock(workspace.shardlab_folder / "gather.lock", lambda _descriptor: progress.print_remark(WAITING_REMARK)):
        for run_id, run_sentences in _gather_from_nodes(workspace, runs_by_node, progress):
            sentences_by_run[run_id] += run_sentences
    for run_id, run_sentences in sentences_by_run.items():
        if not run_sentences:
            RunDir(workspace.runs / run_id).write_event("collect", GATHERED_EVENT)
    return sentences_by_run | refusals_by_run


def _gather_from_nodes(
    workspace: Workspace, runs_by_node: Mapping[str, tuple[str, list[RunDir]]], progress: TransferProgress
) -> list[tuple[str, list[str]]]:
    """Gather the parts of all nodes, AT_ONCE nodes at a time. Returns (run id, sentences) for each node and run.

    If several nodes have a file with the same content, the file is copied from the first of these nodes. The files are moved
    into the run folders after all transfers have ended, in the order of the nodes, so that the result does not depend on which
    node is faster.
    """

    def try_to_list(node_name: str) -> NodeParts:
        cluster_name, node_runs = runs_by_node[node_name]
        run_ids = [run.run_id for run in node_runs]
        try:
            return _list_node_parts(workspace, find_node(workspace, cluster_name, node_name), run_ids, progress)
        except ShardlabError as error:
            return NodeParts(
                node_name, None, [(run_id, [f"the part of {node_name} is missing: {error}"]) for run_id in run_ids]
            )

    with ThreadPoolExecutor(max_workers=min(len(runs_by_node), MOST_NODES_AT_ONCE)) as pool:
        try:
            parts_of_nodes = list(pool.map(try_to_list, runs_by_node))
            claimed_contents: set[tuple[str, str]] = set()
            for parts in parts_of_nodes:
                content_key_by_file = {run_path: (run_path, parts.get_file(run_path).sha256) for run_path in parts.missing}
                parts.copied = [run_path for run_path in parts.missing if content_key_by_file[run_path] not in claimed_contents]
                claimed_contents |= {content_key_by_file[run_path] for run_path in parts.copied}
            list(pool.map(lambda parts: _copy_files(workspace, parts, progress), parts_of_nodes))
        except BaseException:
            progress.stop()  # else the pool would wait until the threads have ended their transfers
            raise
    for parts in parts_of_nodes:
        _store_files(workspace, parts)
    return [run_sentences for parts in parts_of_nodes for run_sentences in parts.sentences_by_run]


def _find_ungathered_placement(run_dir: RunDir) -> tuple[str, Placement] | None:
    """(name of the cluster, placement) of a run that has ended and whose parts have not been gathered; None for other runs."""
    try:
        events = run_dir.read_events()
        run_placement = placement.read_placement(events)
        if run_placement is None or any(event.event == GATHERED_EVENT for event in events):
            return None
        return (run_dir.read_run().cluster["name"], run_placement) if run_dir.judge().state in FINAL_STATES else None
    except ShardlabError:  # the run cannot be read: `fetch_run` reports it later
        return None


def find_node(workspace: Workspace, cluster_name: str, node_name: str) -> InventoryNode:
    """The node of this name in the inventory. Raises InputError if the inventory has no node of this name with shardlab
    installed."""
    node = next((node for node in inventory.read_inventory(workspace, cluster_name).nodes if node.name == node_name), None)
    if node is None or node.python is None:
        raise InputError(f"{inventory.inventory_path(workspace)}: lists no node {node_name} with shardlab.")
    return node


def _list_node_parts(workspace: Workspace, node: InventoryNode, run_ids: list[str], progress: TransferProgress) -> NodeParts:
    """List the files that a node has of these runs, and find out which of them are missing on this machine. run_ids: the run
    ids.

    Raises ShardlabError if the node does not answer.
    """
    node_workspace = remote_workspace.find_node_workspace(workspace, node)
    listed_parts = request_parts(node_workspace, run_ids, progress)
    node_parts = NodeParts(node.name, node_workspace, [], {run_id: part.manifest for run_id, part in listed_parts.items()})
    for run_id in run_ids:
        run_sentences = []
        if run_id not in listed_parts:
            run_sentences.append(f"the part of {node.name} is missing: the node has no folder of this run")
        elif listed_parts[run_id].in_use:
            run_sentences.append(f"the part of {node.name} may grow: a process on the node still works in its folder")
        for file_name, part_file in node_parts.manifests[run_id].files.items() if run_id in listed_parts else ():
            if has_file_content(workspace.runs / run_id, file_name, part_file):
                continue
            if part_files.is_of_first_node(file_name):
                run_sentences.append(f"{file_name} of {node.name} is not stored: only the first node writes this file")
            else:
                node_parts.missing.append(f"{run_id}/{file_name}")
        node_parts.sentences_by_run.append((run_id, run_sentences))
    return node_parts


def request_parts(remote: RemoteWorkspace, run_ids: Sequence[str], progress: TransferProgress) -> dict[str, ListedPart]:
    """Ask a node for its parts of these runs, and check the answer. run_ids: the run ids. Returns {run id: part}.

    Raises ShardlabError if the node does not answer or the answer is not valid.
    """
    must_stop = progress.make_wait_check(f"{remote.mark}: the node reads the files of its parts of {len(run_ids):,} run(s).")
    request_json = msgspec.json.encode(run_ids)
    answered_parts = remote.ask_command(
        "collect.fetching.part_manifest",
        [],
        list[ListedPart],
        input_bytes=request_json,
        limit_s=ANSWER_LIMIT_S,
        must_stop=must_stop,
    )
    listed_parts = {part.manifest.run_id: part for part in answered_parts if part.manifest.run_id in run_ids}
    for run_id, part in listed_parts.items():
        manifest.check_received_manifest(part.manifest, run_id)
    return listed_parts


def _copy_files(workspace: Workspace, node_parts: NodeParts, progress: TransferProgress) -> None:
    """Copy the files in `parts.copied` from a node into a staging folder, and set `parts.arrived` and `parts.error`."""
    staging_folder = _find_staging_folder(workspace, node_parts.node)
    try:
        with files.as_workspace_error("write"):
            if node_parts.remote_workspace is not None and node_parts.copied:
                staging_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _receive_files(node_parts.remote_workspace, node_parts, staging_folder, progress)
    except ShardlabError as error:
        node_parts.transfer_error = str(error)
        node_parts.arrived = _read_staged_files(node_parts, staging_folder)[0]


def _receive_files(remote: RemoteWorkspace, node_parts: NodeParts, staging_folder: Path, progress: TransferProgress) -> None:
    node_parts.arrived, held_copies = _read_staged_files(node_parts, staging_folder)
    asked_files = [name for name in node_parts.copied if name not in node_parts.arrived]
    if not asked_files:
        return
    held_files = {name: copy.file for name, copy in held_copies.items()}
    bytes_by_file = {name: node_parts.get_file(name).bytes for name in asked_files}
    expected_bytes = sum(bytes_by_file.values()) - sum(file.bytes for file in held_files.values())
    run_ids = {name.partition("/")[0] for name in asked_files}
    files_text = f"{len(asked_files):,} files of {len(run_ids):,} run(s)"
    progress.print_remark(f"{node_parts.node}: {files_text}, {expected_bytes / 2**20:,.1f} MiB")
    report_bytes = progress.begin_transfer(expected_bytes)
    with RemoteConversation(remote, "shardlab.transfer.node_files", "collect fetch") as conversation:
        conversation.must_stop = progress.is_stopped
        conversation.send(AskedFiles({**bytes_by_file}, held_files))
        arrived_run = RunReceiver(conversation, None, report_bytes, bytes_by_file).receive_run("", staging_folder, held_copies)
    node_parts.transfer_error = next(iter(arrived_run.run_end.problems), "")
    node_parts.arrived |= {name for name, file in arrived_run.files.items() if file.sha256 == node_parts.get_file(name).sha256}


def _read_staged_files(node_parts: NodeParts, staging_folder: Path) -> tuple[set[str], dict[str, HeldCopy]]:
    """Find what an interrupted transfer left. Returns (the files of `parts.copied` that are complete, the beginnings of
    others)."""
    arrived_names, held_copies = set[str](), dict[str, HeldCopy]()
    for run_path in node_parts.copied:
        try:
            file_status = manifest.read_file_status(staging_folder, run_path)
        except NotRegular:  # a file has the name of a folder that an interrupted transfer left, or a folder that of a file
            shutil.rmtree(staging_folder)
            return set(), {}
        if file_status is None or file_status.st_size > (file := node_parts.get_file(run_path)).bytes:
            continue
        sha256 = manifest.compute_digest(staging_folder / run_path)
        if sha256 == file.sha256:
            arrived_names.add(run_path)
        elif file_status.st_size:
            held_copies[run_path] = HeldCopy(staging_folder / run_path, HeldFile(file_status.st_size, sha256))
    return arrived_names, held_copies


def _store_files(workspace: Workspace, node_parts: NodeParts) -> None:
    """Move the files that arrived from a node into the run folders.

    Adds a sentence to `parts.sentences` for each file that did not arrive, and for each file that differs from a file on this
    machine.
    """
    sentences_by_run, staging_folder, has_all_files = (
        dict(node_parts.sentences_by_run),
        _find_staging_folder(workspace, node_parts.node),
        True,
    )
    for run_path in node_parts.missing:
        run_id, _, name = run_path.partition("/")
        run_dir, file = RunDir(workspace.runs / run_id), node_parts.get_file(run_path)
        if has_file_content(run_dir.path, name, file):  # the file was already stored, because another node had the same file
            continue
        if run_path not in node_parts.arrived:
            has_all_files = False
            error_clause = f" ({node_parts.transfer_error})" if node_parts.transfer_error else ""
            sentences_by_run[run_id].append(f"{name} of {node_parts.node} did not arrive as the node has it{error_clause}")
        elif refusal := _put_file_in_place(run_dir, staging_folder / run_id, name, file):
            sentences_by_run[run_id].append(f"{name} of {node_parts.node} {refusal}")
    # if files did not arrive, the next command uses the files that did arrive
    if has_all_files and node_parts.remote_workspace is not None:
        shutil.rmtree(staging_folder, ignore_errors=True)


def _find_staging_folder(workspace: Workspace, node_name: str) -> Path:
    return workspace.runs / STAGING_FOLDER / node_name


def has_file_content(run_path: Path, file_name: str, manifest_file: ManifestFile) -> bool:
    """Whether a run folder has a file of this name and content.

    A file that can grow may also be longer, if it begins with this content.
    """
    try:
        file_status = manifest.read_file_status(run_path, file_name)
    except NotRegular:
        return False
    compared_bytes = manifest_file.bytes if part_files.is_growing(file_name) else None
    return (
        file_status is not None
        and file_status.st_size >= manifest_file.bytes
        and manifest.compute_digest(run_path / file_name, compared_bytes) == manifest_file.sha256
    )


def _put_file_in_place(run_dir: RunDir, staging_folder: Path, file_name: str, manifest_file: ManifestFile) -> str:
    """Move a file that arrived into the run folder.

    Returns '', or the reason why the file was not moved, as the rest of a sentence that begins with the name of the file.
    """
    try:
        file_status = manifest.read_file_status(run_dir.path, file_name)
    except NotRegular as error:
        return f"is not stored: {error.filename} is {error.kind}"
    is_longer = (
        part_files.is_growing(file_name)
        and file_status is not None
        and part_files.is_beginning(run_dir.path / file_name, staging_folder / file_name)
    )
    if file_status is not None and not is_longer:
        return "is not stored: the file of this name on the first node has other content"
    with files.as_workspace_error("write"):
        manifest.put_in_place(staging_folder / file_name, run_dir.path / file_name, manifest_file)
    return ""
