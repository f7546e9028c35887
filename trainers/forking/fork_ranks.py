"""The parent process of the ranks of one run. It kills all ranks if a rank that the run needs fails, or if the client ends. If
the parent process itself ends, the kernel kills the ranks."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from trainers import menu
from trainers.forking import address
from trainers.ranks.process_exit import exit_at_once
from trainers.ranks.rank import STORE

PR_SET_PDEATHSIG = 1
OF_OTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def raise_ranks(connection: socket.socket) -> None:
    """Read a request from the client's connection, fork the ranks in a new session, and answer with their exit code.

    If the client ends before the ranks, the whole process group is killed, including this process.
    """
    os.setsid()
    request, descriptors = address.receive(connection, descriptors=2)
    if request is None or len(descriptors) != 2:
        return
    _take_over(request, descriptors)
    address.send(connection, {"begun": os.getpid()})
    meeting = Path(tempfile.mkdtemp(prefix="shardlab-ranks-"))
    os.environ[STORE] = str(meeting / "store")
    ranks = [_fork_rank(rank, request, connection) for rank in range(int(request["world_size"]))]
    code = _wait(ranks, connection, RunDir(Path(request["run_dir"])))
    shutil.rmtree(meeting, ignore_errors=True)
    if code is None:
        os.killpg(0, signal.SIGKILL)
    address.send(connection, {"exit_code": code})


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Use the environment, the working folder, standard output and standard error of the client, and hide all GPUs."""
    os.environ.clear()
    os.environ.update({name: value for name, value in request["environment"].items() if name not in OF_OTHER_LAUNCHERS})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host name, which may fail
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(request["world_size"])
    os.chdir(request["folder"])
    for descriptor, standard in zip(descriptors, (1, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)


def _fork_rank(rank: int, request: dict[str, Any], connection: socket.socket) -> int:
    """Fork one rank. Returns its process id; the forked process trains and never returns."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        connection.close()
        _die_with(parent)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        code = console.run(lambda: _run(Path(request["run_dir"])))
    except BaseException:  # noqa: BLE001 - no exception of the forked process may reach the parent's code
        traceback.print_exc()
    finally:
        exit_at_once(code)


def _run(path: Path) -> int:
    from trainers.run import process

    process.run(path)
    return 0


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent process ends. parent: the process id of the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call of prctl


def _dispensable(run_dir: RunDir) -> list[int]:
    """The ranks without which the run can continue. There are no such ranks unless the strategy tolerates lost ranks.

    With a strategy that tolerates lost ranks, each rank that trains, except rank 0, is dispensable as soon as its setup is
    complete. Before that time, the other ranks wait for this rank.
    """
    run = run_dir.read_run()
    cell = run.cell
    if not (run.own_strategy or menu.strategy(cell.strategy)).tolerates_lost_ranks:  # no code of a user is executed here
        return []
    return [rank for rank in range(1, cell.gpus) if run_dir.steps_file(rank).exists()]


def _wait(ranks: list[int], connection: socket.socket, run_dir: RunDir) -> int | None:
    """Wait until all ranks have ended. After the first failure, or if the client ends, the other ranks are killed.

    Returns the exit code of the first rank that failed (128 + number of the signal if it was killed), 0 if no rank failed, or
    None if the client ended. If a dispensable rank is killed by a signal, this is not a failure: an event `lost` of the run is
    written. If a dispensable rank ends with an error, it has failed like any other rank.
    """
    living = {os.pidfd_open(pid): pid for pid in ranks}
    waiting = select.poll()
    for descriptor in (connection.fileno(), *living):
        waiting.register(descriptor, select.POLLIN)
    failed, gone = 0, False
    while living:
        for descriptor, _ in waiting.poll():
            if descriptor == connection.fileno():  # the client sends no more messages, so it has ended
                gone = True
                waiting.unregister(descriptor)
            else:
                pid = living.pop(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                waiting.unregister(descriptor)
                os.close(descriptor)
                rank = ranks.index(pid)
                if status < 0 and not (failed or gone) and rank in _dispensable(run_dir):
                    run_dir.write_event("ranks", "lost", rank=rank, why=f"rank {rank} was killed by signal {-status}")
                    continue
                failed = failed or (status if status >= 0 else 128 - status)
        if failed or gone:
            for pid in living.values():
                os.kill(pid, signal.SIGKILL)
    return None if gone else failed
