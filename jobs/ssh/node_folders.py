"""Sends the files that ranks need to the nodes of a run, if the nodes share no folder: each node has a part of the run's
folder.

The parts have the same path on every node. Only the first node has the folder `claim`, which contains a random text (a token).
So a node that finds this token in its folder is the first node itself.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs.ssh import checkpoint_parts, node_transfer
from jobs.ssh.checkpoint_parts import StoredCheckpoint
from jobs.ssh.node_task import TOKEN_FILE
from jobs.ssh.node_transfer import MustStop
from jobs.ssh.step import NodeLost, make_login_argv, read_last_ssh_line
from shardlab.errors import ShardlabError
from shardlab.files import files, plugin_source
from shardlab.runs.run import Run
from shardlab.runs.rundir import WORK_FOLDER, RunDir
from shardlab.transfer.messages import WantedIf
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

ANSWER_S = 60.0
# A shell script that makes a node's part of the run's folder. Its answer is the line that begins with the token, because a
# .bashrc may print other lines. The answer `own` means that the folder is the folder of the first node. `made`: the part was
# made, and a folder of an earlier run with this name was renamed. `shared NAME`: the node NAME has made its part in the same
# folder. The script renames the finished part to its final path, so only one of two nodes that share a folder can succeed. If
# two such nodes rename the earlier folder at the same time, the second node finds no folder, or renames the part of the first
# node and then puts that part back.
PREPARE_SCRIPT = """\
folder=$1 token=$2 name=$3
if test "$(cat "$folder/$5" 2>/dev/null)" = "$token"; then echo "$token own"; exit; fi
beside=$(dirname "$folder")/.$(basename "$folder").$token.$name
mkdir -p -- "$beside.new/log" "$4"
echo "$token $name" > "$beside.new/.part"
if test -e "$folder" && ! grep -qs "^$token " "$folder/.part"; then mv -T -- "$folder" "$beside.old" || true; fi
made=$(grep -s "^$token " "$beside.old/.part" || true)
if test -n "$made"; then mv -T -- "$beside.old" "$folder" || true
elif mv -T -- "$beside.new" "$folder"; then echo "$token made"; exit; fi
rm -r -- "$beside.new"
made=${made:-$(grep -s "^$token " "$folder/.part")}
echo "$token shared ${made#* }"
"""


def send_run_files(run_dir: RunDir, run: Run, nodes: Sequence[InventoryNode], must_stop: MustStop) -> None:
    """Send the files of a run, and the checkpoint from which it resumes, to each of its nodes. must_stop: says whether the run
    must end; if so, the transfers end.

    Raises NodeLost if a node does not answer, ShardlabError if a node cannot store the files, if nodes share a folder, or if no
    checkpoint is usable.
    """
    workspace = Workspace(run_dir.path.parent.parent)
    token = secrets.token_hex(8)
    files.write_new(run_dir.path / TOKEN_FILE, token.encode())
    stored_checkpoint = checkpoint_parts.gather_checkpoint(run_dir, run, must_stop)
    with ThreadPoolExecutor(max_workers=len(nodes)) as thread_pool:
        node_answers = list(thread_pool.map(lambda node: _prepare_node(workspace, run_dir, node, token), nodes))
        _must_be_separate(run_dir, nodes, node_answers)
        other_nodes = [node for node, answer in zip(nodes, node_answers, strict=True) if answer != "own"]
        for transfer_future in [
            thread_pool.submit(_send_to_node, workspace, run_dir, run, node, stored_checkpoint, must_stop)
            for node in other_nodes
        ]:
            transfer_future.result()


def _send_to_node(
    workspace: Workspace,
    run_dir: RunDir,
    run: Run,
    node: InventoryNode,
    stored_checkpoint: StoredCheckpoint | None,
    must_stop: MustStop,
) -> None:
    file_names = [
        f"runs/{run_dir.run_id}/{file_name}"
        for file_name in files.list_names(run_dir.path)
        if _is_rendered(run_dir.path / file_name)
    ]
    file_names += [os.path.relpath(run.source, workspace.path)] if run.source is not None else []
    wanted_by_path: dict[str, WantedIf] = dict.fromkeys(file_names, "different")
    if stored_checkpoint is not None:
        old_run_dir = stored_checkpoint.old_run_dir
        old_folder = f"runs/{old_run_dir.run_id}"
        wanted_by_path[f"{old_folder}/{stored_checkpoint.path.relative_to(old_run_dir.path)}"] = "different"
        # Files that the node has already are kept, because the node wrote them itself. Only its files of step records are
        # replaced, if they end earlier than the files on this machine.
        event_names = [file_name for file_name in files.list_names(old_run_dir.path) if file_name.startswith("events.")]
        wanted_by_path |= dict.fromkeys((f"{old_folder}/{file_name}" for file_name in ("run.json", *event_names)), "missing")
        if (old_run_dir.path / "steps").exists():
            wanted_by_path[f"{old_folder}/steps"] = "longer"
    node_transfer.send_files(node, workspace, wanted_by_path, must_stop)


def _prepare_node(workspace: Workspace, run_dir: RunDir, node: InventoryNode, token: str) -> str:
    """Make the folders for a node's part of the run, and return the answer of the script PREPARE_SCRIPT. Raises NodeLost and
    ShardlabError."""
    log_path = run_dir.log / f"ssh.{node.name}.log"
    script_words = ["sh", "-euc", PREPARE_SCRIPT, "prepare", str(run_dir.path), token, node.name]
    script_words += [str(workspace.shardlab_folder), TOKEN_FILE]
    argv = make_login_argv(node, log_path, shlex.join(script_words))
    try:
        ssh_result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise NodeLost(node.name, f"did not answer within {ANSWER_S:g} s") from None
    error_lines = ssh_result.stderr.decode("utf-8", "replace").strip().splitlines()
    if ssh_result.returncode == 255:
        raise NodeLost(node.name, read_last_ssh_line(log_path) or "the connection broke")
    output_lines = ssh_result.stdout.decode("utf-8", "replace").splitlines()
    script_answer = next((line.removeprefix(f"{token} ") for line in output_lines if line.startswith(f"{token} ")), "")
    if ssh_result.returncode or not script_answer:
        failure_reason = error_lines[-1] if error_lines else f"exit code {ssh_result.returncode}"
        raise ShardlabError(
            f"{node.name}: cannot make the folder {run_dir.path} ({failure_reason}). "
            "`provision` makes the folder of the workspaces on each node."
        )
    return script_answer


def _must_be_separate(run_dir: RunDir, nodes: Sequence[InventoryNode], node_answers: Sequence[str]) -> None:
    """Raises ShardlabError if two of the nodes share the run's folder: each of them would treat the files of the other node as
    its own."""
    first_node_names = [node.name for node, answer in zip(nodes, node_answers, strict=True) if answer == "own"]
    sharing_names = first_node_names if len(first_node_names) > 1 else []
    for node, answer in zip(nodes, node_answers, strict=True):
        if not sharing_names and answer.startswith("shared "):
            sharing_names = [*(other_node.name for other_node in nodes if answer == f"shared {other_node.name}"), node.name]
    if sharing_names:
        raise ShardlabError(
            f"the nodes {' and '.join(sharing_names)} share the folder {run_dir.path.parent}, but the cluster file names no "
            "shared folder. Set storage.shared to a folder that all nodes share, or storage.mount to a folder on each node's "
            "own disk."
        )


def _is_rendered(path: Path) -> bool:
    """Whether a file of the run's folder was written when the run was rendered, before it started."""
    return (path.is_file() and not path.name.startswith((".", "events."))) or path.name in (
        *plugin_source.CARRIED_FOLDERS,
        WORK_FOLDER,
    )
