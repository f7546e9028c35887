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
from trainers.ranks.rank import STORE_VARIABLE

PR_SET_PDEATHSIG = 1
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def serve_run(connection: socket.socket) -> None:
    """Read a request from the client's connection, fork the ranks in a new session, and answer with their exit code.

    If the client ends before the ranks, the whole process group is killed, including this process.
    """
    os.setsid()
    request, descriptors = address.receive_message(connection, descriptor_count=2)
    if request is None or len(descriptors) != 2:
        return
    _adopt_client_environment(request, descriptors)
    address.send_message(connection, {"begun": os.getpid()})
    rendezvous_folder = Path(tempfile.mkdtemp(prefix="shardlab-ranks-"))
    os.environ[STORE_VARIABLE] = str(rendezvous_folder / "store")
    pids = [_fork_rank(rank, request, connection) for rank in range(int(request["world_size"]))]
    exit_code = _wait_for_ranks(pids, connection, RunDir(Path(request["run_dir"])))
    shutil.rmtree(rendezvous_folder, ignore_errors=True)
    if exit_code is None:
        os.killpg(0, signal.SIGKILL)
    address.send_message(connection, {"exit_code": exit_code})


def _adopt_client_environment(request: dict[str, Any], descriptors: list[int]) -> None:
    """Use the environment, the working folder, standard output and standard error of the client, and hide all GPUs."""
    os.environ.clear()
    os.environ.update({name: value for name, value in request["environment"].items() if name not in LAUNCHER_VARIABLES})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host name, which may fail
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(request["world_size"])
    os.chdir(request["folder"])
    for descriptor, standard_descriptor in zip(descriptors, (1, 2)):
        os.dup2(descriptor, standard_descriptor)
        os.close(descriptor)


def _fork_rank(rank: int, request: dict[str, Any], connection: socket.socket) -> int:
    """Fork one rank. Returns its process id; the forked process trains and never returns."""
    parent_pid = os.getpid()
    if pid := os.fork():
        return pid
    exit_code = 1
    try:
        connection.close()
        _kill_with_parent(parent_pid)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        exit_code = console.run_command(lambda: _train_rank(Path(request["run_dir"])))
    except BaseException:  # noqa: BLE001 - no exception of the forked process may reach the parent's code
        traceback.print_exc()
    finally:
        exit_at_once(exit_code)


def _train_rank(run_folder: Path) -> int:
    from trainers.run import process

    process.run_rank(run_folder)
    return 0


def _kill_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent process ends. parent_pid: the process id of the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the call of prctl


def _find_dispensable_ranks(run_dir: RunDir) -> list[int]:
    """The ranks without which the run can continue. There are no such ranks unless the strategy tolerates lost ranks.

    With a strategy that tolerates lost ranks, each rank that trains, except rank 0, is dispensable as soon as its setup is
    complete. Before that time, the other ranks wait for this rank.
    """
    run = run_dir.read_run()
    cell = run.training_cell
    if not (run.own_strategy or menu.find_strategy(cell.strategy)).tolerates_lost_ranks:  # no code of a user is executed here
        return []
    return [rank for rank in range(1, cell.gpus) if run_dir.steps_file(rank).exists()]


def _wait_for_ranks(pids: list[int], connection: socket.socket, run_dir: RunDir) -> int | None:
    """Wait until all ranks have ended. After the first failure, or if the client ends, the other ranks are killed.

    Returns the exit code of the first rank that failed (128 + number of the signal if it was killed), 0 if no rank failed, or
    None if the client ended. If a dispensable rank is killed by a signal, this is not a failure: an event `lost` of the run is
    written. If a dispensable rank ends with an error, it has failed like any other rank.
    """
    pid_by_descriptor = {os.pidfd_open(pid): pid for pid in pids}
    poller = select.poll()
    for descriptor in (connection.fileno(), *pid_by_descriptor):
        poller.register(descriptor, select.POLLIN)
    failure_code, client_ended = 0, False
    while pid_by_descriptor:
        for descriptor, _ in poller.poll():
            if descriptor == connection.fileno():  # the client sends no more messages, so it has ended
                client_ended = True
                poller.unregister(descriptor)
            else:
                pid = pid_by_descriptor.pop(descriptor)
                exit_status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                poller.unregister(descriptor)
                os.close(descriptor)
                rank = pids.index(pid)
                if exit_status < 0 and not (failure_code or client_ended) and rank in _find_dispensable_ranks(run_dir):
                    run_dir.write_event("ranks", "lost", rank=rank, why=f"rank {rank} was killed by signal {-exit_status}")
                    continue
                failure_code = failure_code or (exit_status if exit_status >= 0 else 128 - exit_status)
        if failure_code or client_ended:
            for pid in pid_by_descriptor.values():
                os.kill(pid, signal.SIGKILL)
    return None if client_ended else failure_code
