"""The scheduler `ssh`: starts runs over SSH on nodes without Slurm, in the order of submission. Two runs never share a node.

Its runner is a process on the first node of the cluster. A run starts when enough nodes are free and answer. The runner locks
the nodes of a run (a lock file for each node), and the supervisor of the run inherits the locks. So the kernel unlocks the
nodes when the supervisor ends, whatever the reason, and a later runner sees which nodes are in use.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from jobs import run_queue
from jobs.node.rendezvous import NODES
from jobs.run_queue import SCRIPT, RunQueue, cancel, cancel_jobs, damaged, hold, release, resolve
from jobs.scheduler import ObservedRun, RunOnDisk, SubmitOptions
from jobs.ssh import node_lock
from jobs.ssh.step import last_line, login
from shardlab.errors import ShardlabError
from shardlab.remote.remote import CONNECT_S
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

__all__ = [
    "NAME", "POLL_S", "SCRIPT", "TEMPLATE", "TEMPLATES", "attend", "cancel", "cancel_jobs", "damaged", "hold", "observe",
    "release", "resolve", "submit",
]  # fmt: skip
NAME = "ssh"
TEMPLATE = "launch/ssh.sh.j2"
TEMPLATES = (TEMPLATE,)
POLL_S = 1.0
ANSWER_S = CONNECT_S + 5


class InUse(Exception):
    """Raised if another run holds the lock of a node. The message says which process of another user holds it."""


def submit(workspace: Workspace, folders: Sequence[RunDir], how: SubmitOptions) -> None:
    """Submit runs, in this order, and start a runner if no runner is alive."""
    RunQueue(NAME, workspace).submit(folders)


def attend(workspace: Workspace) -> None:
    """Start a runner if runs wait and no runner is alive, because the runner may have been killed."""
    RunQueue(NAME, workspace).attend()


def observe(workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
    """The state of each run, from its events and from the supervisors on this machine."""
    return RunQueue(NAME, workspace).observe(runs)


def work(workspace: Workspace) -> int:
    """The work of the runner: until no run waits, start the first waiting run as soon as enough nodes are free; return the exit
    code. A workspace has only one runner at a time."""
    queue = RunQueue(NAME, workspace)
    return queue.work_off(lambda: _start_runs(workspace, queue))


def _start_runs(workspace: Workspace, queue: RunQueue) -> None:
    running: dict[str, subprocess.Popen[bytes]] = {}  # the processes of the runs' scripts, by run id
    queue.record_lost()
    while True:
        for name, script in list(running.items()):
            if (code := script.poll()) is not None:
                queue.after_end(RunDir(workspace.runs / name), code)
                del running[name]
        first = next((folder for folder in queue.startable() if folder.run_id not in running), None)
        if first is None and not running:
            return
        started = _start(workspace, first) if first is not None else None
        if first is not None and started is not None:
            running[first.run_id] = started
        else:
            time.sleep(POLL_S)


def _start(workspace: Workspace, folder: RunDir) -> subprocess.Popen[bytes] | None:
    """Start the script of a run if enough nodes are free and answer.

    Returns None if the run has to wait, or if it can never start; in the second case, a failure of the run is recorded.
    """
    run = folder.read_run()
    try:
        workers = inventory.read(workspace, run.cluster["name"]).with_role("worker")
    except ShardlabError as error:
        run_queue.record_failure(folder, str(error))
        return None
    if len(workers) < run.world.nnodes:
        why = f"the run needs {run.world.nnodes} nodes, and the inventory lists {len(workers)} nodes with the role worker"
        run_queue.record_failure(folder, why)
        return None
    workers.sort(key=lambda node: node.name in run.avoid)  # nodes that failed in earlier attempts come last
    with contextlib.ExitStack() as locks:
        held: dict[str, int] = {}
        chosen, why = _free(workers, run.world.nnodes, folder, held, locks)
        if len(chosen) < run.world.nnodes:
            _note_wait(folder, why)
            return None
        names = [node.name for node in chosen]
        return run_queue.start(folder, {NODES: ",".join(names)}, [held[name] for name in names])


def _free(
    workers: Sequence[InventoryNode], count: int, folder: RunDir, held: dict[str, int], locks: contextlib.ExitStack
) -> tuple[list[InventoryNode], str]:
    """Find nodes for a run. Returns (up to `count` nodes that are free and answer, why there are not more).

    folder: the run's folder, into which ssh writes its log. held: a dictionary into which this function writes the descriptor
    of each node's lock, by the name of the node. locks: the exit stack that releases the locks.
    """
    chosen: list[InventoryNode] = []
    silent: list[str] = []
    users: list[str] = []
    free = list(_locked(workers, held, locks, users))
    while len(chosen) < count and free:
        asked, free = free[: count - len(chosen)], free[count - len(chosen) :]
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            answers = list(pool.map(lambda node: _answer(node, folder), asked))
        chosen += [node for node, answer in zip(asked, answers, strict=True) if not answer]
        silent += [f"{node.name} does not answer ({answer})" for node, answer in zip(asked, answers, strict=True) if answer]
    return chosen, "; ".join(silent or ["waits for free nodes", *users])


def _locked(
    workers: Sequence[InventoryNode], held: dict[str, int], locks: contextlib.ExitStack, users: list[str]
) -> Iterator[InventoryNode]:
    """Yields the nodes whose locks this process gets. users: gets a clause for each node that another user uses."""
    for node in workers:
        try:
            held[node.name] = locks.enter_context(node_lock.held("node", node.host, _in_use))
        except InUse as in_use:
            users += [f"{node.name} is used by {in_use}"] if str(in_use) else []
        else:
            yield node


def _in_use(lock: int) -> None:
    user, who = node_lock.holder(lock)
    raise InUse("" if user == os.geteuid() else who)


def _answer(node: InventoryNode, folder: RunDir) -> str:
    """Try to log in to a node. Returns '' if the node accepts the login, otherwise the error that ssh printed."""
    folder.log.mkdir(exist_ok=True)
    log = folder.log / f"ssh.{node.name}.log"
    log.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [*login(node, log), "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not within {ANSWER_S:g} s"
    return (last_line(log) or f"exit code {done.returncode}") if done.returncode else ""


def _note_wait(folder: RunDir, why: str) -> None:
    """Record why a run waits, unless the last such event of the run has the same reason."""
    said = next((event for event in reversed(folder.events()) if event.event == "queued"), None)
    if said is None or said.data.get("why") != why:
        folder.write_event("queue", "queued", why=why)


if __name__ == "__main__":
    run_queue.run_as_runner(work)
