"""The scheduler `ssh`: starts runs over SSH on nodes without Slurm, in the order of submission. Two runs never share a node.

Its runner is a process on the first node of the cluster. A run starts when enough nodes are free and answer. The runner locks
the nodes of a run (a lock file for each node), and the supervisor of the run inherits the locks. So the kernel unlocks the
nodes when the supervisor ends, whatever the reason, and a later runner sees which nodes are in use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from jobs import run_queue
from jobs.node.rendezvous import NODES_VARIABLE
from jobs.run_queue import QueueScheduler, RunQueue
from jobs.ssh import node_lock
from jobs.ssh.step import make_login_argv, read_last_ssh_line
from shardlab.errors import ShardlabError
from shardlab.remote.ssh_command import CONNECT_S, describe_lost_command
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

ANSWER_S = CONNECT_S + 5


class NodeInUse(Exception):
    """Raised if another run holds the lock of a node. The message says which process of another user holds it."""


class SshScheduler(QueueScheduler):
    """Starts runs over SSH on free nodes of the cluster."""

    NAME = "ssh"
    TEMPLATE = "launch/ssh.sh.j2"
    TEMPLATES = (TEMPLATE,)
    POLL_S = 1.0

    def start_runs(self, workspace: Workspace, queue: RunQueue) -> None:
        """Until no run waits, start the first waiting run as soon as enough nodes are free."""
        scripts_by_run: dict[str, subprocess.Popen[bytes]] = {}  # the processes of the runs' scripts, by run id
        queue.record_lost_runs()
        while True:
            for run_id, script_process in list(scripts_by_run.items()):
                if (exit_code := script_process.poll()) is not None:
                    queue.record_failed_start(RunDir(workspace.runs / run_id), exit_code)
                    del scripts_by_run[run_id]
            first_folder = next((folder for folder in queue.list_startable_runs() if folder.run_id not in scripts_by_run), None)
            if first_folder is None and not scripts_by_run:
                return
            started_script = _start_run(workspace, first_folder) if first_folder is not None else None
            if first_folder is not None and started_script is not None:
                scripts_by_run[first_folder.run_id] = started_script
            else:
                time.sleep(self.POLL_S)


def _start_run(workspace: Workspace, run_dir: RunDir) -> subprocess.Popen[bytes] | None:
    """Start the script of a run if enough nodes are free and answer.

    Returns None if the run has to wait, or if it can never start; in the second case, a failure of the run is recorded.
    """
    run = run_dir.read_run()
    try:
        worker_nodes = inventory.read_inventory(workspace, run.cluster["name"]).list_with_role("worker")
    except ShardlabError as error:
        run_queue.record_failure(run_dir, str(error))
        return None
    if len(worker_nodes) < run.world.nnodes:
        wait_reason = (
            f"the run needs {run.world.nnodes} nodes, and the inventory lists {len(worker_nodes)} nodes with the role worker"
        )
        run_queue.record_failure(run_dir, wait_reason)
        return None
    worker_nodes.sort(key=lambda node: node.name in run.avoid)  # nodes that failed in earlier attempts come last
    with contextlib.ExitStack() as lock_stack:
        locks_by_node: dict[str, int] = {}
        chosen_nodes, wait_reason = _find_free_nodes(worker_nodes, run.world.nnodes, run_dir, locks_by_node, lock_stack)
        if len(chosen_nodes) < run.world.nnodes:
            _record_wait(run_dir, wait_reason)
            return None
        node_names = [node.name for node in chosen_nodes]
        return run_queue.start_script(
            run_dir, {NODES_VARIABLE: ",".join(node_names)}, [locks_by_node[name] for name in node_names]
        )


def _find_free_nodes(
    worker_nodes: Sequence[InventoryNode],
    node_count: int,
    run_dir: RunDir,
    locks_by_node: dict[str, int],
    lock_stack: contextlib.ExitStack,
) -> tuple[list[InventoryNode], str]:
    """Find nodes for a run. Returns (up to `node_count` nodes that are free and answer, why there are not more).

    run_dir: the run's folder, into which ssh writes its log. locks_by_node: a dictionary into which this function writes the
    descriptor of each node's lock, by the name of the node. lock_stack: the exit stack that releases the locks."""
    chosen_nodes: list[InventoryNode] = []
    silent_clauses: list[str] = []
    user_clauses: list[str] = []
    free_nodes = list(_lock_nodes(worker_nodes, locks_by_node, lock_stack, user_clauses))
    while len(chosen_nodes) < node_count and free_nodes:
        asked_nodes, free_nodes = free_nodes[: node_count - len(chosen_nodes)], free_nodes[node_count - len(chosen_nodes) :]
        with ThreadPoolExecutor(max_workers=len(asked_nodes)) as thread_pool:
            login_errors = list(thread_pool.map(lambda node: _try_login(node, run_dir), asked_nodes))
        chosen_nodes += [node for node, login_error in zip(asked_nodes, login_errors, strict=True) if not login_error]
        silent_clauses += [
            f"{node.name} does not answer ({login_error})"
            for node, login_error in zip(asked_nodes, login_errors, strict=True)
            if login_error
        ]
    return chosen_nodes, "; ".join(silent_clauses or ["waits for free nodes", *user_clauses])


def _lock_nodes(
    worker_nodes: Sequence[InventoryNode],
    locks_by_node: dict[str, int],
    lock_stack: contextlib.ExitStack,
    user_clauses: list[str],
) -> Iterator[InventoryNode]:
    """Yields the nodes whose locks this process gets. user_clauses: gets a clause for each node that another user uses."""
    for node in worker_nodes:
        try:
            locks_by_node[node.name] = lock_stack.enter_context(node_lock.hold_lock("node", node.host, _raise_node_in_use))
        except NodeInUse as node_in_use:
            user_clauses += [f"{node.name} is used by {node_in_use}"] if str(node_in_use) else []
        else:
            yield node


def _raise_node_in_use(lock: int) -> None:
    user_id, holder_phrase = node_lock.find_lock_holder(lock)
    raise NodeInUse("" if user_id == os.geteuid() else holder_phrase)


def _try_login(node: InventoryNode, run_dir: RunDir) -> str:
    """Try to log in to a node. Returns '' if the node accepts the login, otherwise the error that ssh printed."""
    run_dir.log.mkdir(exist_ok=True)
    log_path = run_dir.log / f"ssh.{node.name}.log"
    log_path.unlink(missing_ok=True)
    start_mark = secrets.token_hex(8)
    argv = make_login_argv(node, log_path, "true", start_mark)
    try:
        login_result = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not within {ANSWER_S:g} s"
    if f"{start_mark}\n" in login_result.stdout:
        return ""
    return read_last_ssh_line(log_path) or describe_lost_command(
        node.name, login_result.returncode, login_result.stdout, login_result.stderr
    )


def _record_wait(run_dir: RunDir, why: str) -> None:
    """Record why a run waits, unless the last such event of the run has the same reason."""
    queued_event = next((event for event in reversed(run_dir.read_events()) if event.event == "queued"), None)
    if queued_event is None or queued_event.data.get("why") != why:
        run_dir.write_event("queue", "queued", why=why)


SCHEDULER = SshScheduler()
if __name__ == "__main__":
    SCHEDULER.run_as_runner()
