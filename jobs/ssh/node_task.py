"""The part of a run on one node, started over SSH by jobs.ssh.step: locks the node, starts jobs.supervisor.step_task and
watches it.

    python -m jobs.ssh.node_task

Standard input: a TaskRequest, then the address of the rendezvous, then an empty line every BEAT_INTERVAL_S seconds. Standard
output: lines that begin with LINE_PREFIX: `ready` with a free address for the rendezvous, and at the end `exit CODE`; if the
nodes share no folder, also a line `record` with a RecordChange for each change of this node's records. Other output goes to
standard error. If the input ends, or brings nothing for MOST_SILENT_S seconds, the connection or the supervisor is lost, and
the task ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from jobs.node import node_processes
from jobs.node.rendezvous import NODE_VARIABLE, NODES_VARIABLE, RENDEZVOUS_VARIABLE, RendezvousError
from jobs.node.wait_for_gpus import VISIBLE_DEVICES_VARIABLE
from jobs.ssh import node_lock
from jobs.ssh.record_mirror import RecordReader
from shardlab.errors import ShardlabError
from shardlab.files import files, json_file, source_digest
from shardlab.terminal import console

LINE_PREFIX = "shardlab:"  # the begin of each line that this program prints, because a .bashrc may print other lines
BEAT_INTERVAL_S, MOST_SILENT_S = 5.0, 60.0
START_S = 180  # the most seconds until all nodes are ready
MOST_BUSY_S = 30.0  # the most seconds to wait until another run, which is ending, no longer uses the node
RECORD_INTERVAL_S = 1.0  # seconds between two checks for new records
MOST_SEND_S = 60.0  # the most seconds to send the last records after the end of the task
TOKEN_FILE = "claim/first-node"  # a file in the run's folder of the first node, if the nodes share no folder
_WRITE_LOCK = threading.Lock()  # held while a line is written, so that lines of two threads do not mix


class TaskRequest(msgspec.Struct, frozen=True):
    """The request to a node to start its task of a run."""

    folder: str
    """The run's folder."""
    launcher_argv: list[str]
    """The command line of the launcher, for jobs.supervisor.step_task."""
    environment: dict[str, str]
    node_number: int
    """The number of the node in the run, from 0."""
    node_addresses: list[str]
    """The addresses of the run's nodes, in their order."""
    gpu_count: int
    """The number of GPUs that the ranks of this node use."""
    folder_token: str = ""
    """If the nodes share no folder: the text in the claim, by which a node knows that it is the first node."""
    packages_digest: str | None = None
    """If the nodes share no folder: the digest of the packages that the run was submitted with."""


def main() -> int:
    """Read a TaskRequest, execute the task, and return its exit code. Raises ShardlabError."""
    request_line = sys.stdin.buffer.readline()
    request = json_file.decode_standard_input(request_line, TaskRequest, "a request of this version of shardlab")
    if request.packages_digest not in (None, own_digest := source_digest.digest_installed_packages()):
        raise ShardlabError(
            f"{socket.gethostname()}: its installed packages (digest {own_digest}) are not those of the first node (digest "
            f"{request.packages_digest}). Run: provision CLUSTER.yaml"
        )
    own_host = request.node_addresses[request.node_number]
    with node_lock.hold_lock("run", own_host, _wait_for_lock):
        _write_line(f"ready {_find_free_address(own_host) if request.node_number == 0 else '-'}")
        signal.alarm(START_S)  # SIGALRM ends this process if no rendezvous arrives in time
        rendezvous = sys.stdin.buffer.readline().decode().strip()
        signal.alarm(0)
        if not rendezvous:  # the supervisor sends no rendezvous, because another node is not ready
            return 1
        os.chdir(request.folder)
        task_process = _start_task(request, rendezvous)
        # starts a thread, so it must come after the fork of the task
        record_sender = RecordSender(Path(request.folder)) if _has_own_folder(request) else None
        exit_code = _supervise_task(task_process)
        # Ends the processes that jobs.supervisor.step_task marked with this text, in case jobs.supervisor.step_task was killed
        # before it could end its ranks.
        node_processes.kill_marked_processes(f"{request.folder}#{request.node_number}.0")
        if record_sender is not None:
            record_sender.finish()
        _write_line(f"exit {exit_code}")
    return exit_code


class RecordSender:
    """Sends the records of this node to the first node. It uses a thread, because writing blocks if the connection hangs."""

    def __init__(self, folder: Path) -> None:
        self._reader, self._ended, self._error = RecordReader(folder), threading.Event(), ""
        self._thread = threading.Thread(target=self._run_task, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send the last records. Raises ShardlabError if records could not be read, or could not be sent within MOST_SEND_S
        seconds; the first node then does not have all records."""
        self._ended.set()
        self._thread.join(MOST_SEND_S)
        if self._thread.is_alive():
            raise ShardlabError(f"{socket.gethostname()}: the last records could not be sent within {MOST_SEND_S:g} s.")
        if self._error:
            raise ShardlabError(self._error)

    def _run_task(self) -> None:
        is_last_round = False
        try:
            while not is_last_round:
                is_last_round = self._ended.wait(RECORD_INTERVAL_S)
                for change in self._reader.read_changes():
                    _write_line(f"record {msgspec.json.encode(change).decode()}")
        except ShardlabError as error:
            self._error = str(error)


def _has_own_folder(request: TaskRequest) -> bool:
    """Whether the folder of the run on this node is not the same folder as on the first node."""
    if not request.folder_token:
        return False
    token_path = Path(request.folder) / TOKEN_FILE
    return not token_path.exists() or files.read(token_path).decode(errors="replace") != request.folder_token


def _start_task(request: TaskRequest, rendezvous: str) -> subprocess.Popen[bytes]:
    visible_devices = os.environ.get(VISIBLE_DEVICES_VARIABLE, ",".join(map(str, range(request.gpu_count))))
    environment = {
        **os.environ,
        **request.environment,
        RENDEZVOUS_VARIABLE: rendezvous,
        NODE_VARIABLE: str(request.node_number),
        NODES_VARIABLE: ",".join(request.node_addresses),
        VISIBLE_DEVICES_VARIABLE: visible_devices,
    }
    task_argv = [sys.executable, "-P", "-m", "jobs.supervisor.step_task", request.folder, "--", *request.launcher_argv]
    return node_processes.start_process(task_argv, sys.stderr.fileno(), environment)


def _supervise_task(task_process: subprocess.Popen[bytes]) -> int:
    """Wait until the task ends, or end it if the supervisor asks for this or is lost. Returns the exit code of the task."""
    received_signals: list[int] = []
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda signal_number, _frame: received_signals.append(signal_number))
    last_heard_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while (exit_code := task_process.poll()) is None:
            if selector.select(timeout=0.1):
                if not os.read(sys.stdin.fileno(), 4096):
                    break
                last_heard_s = time.monotonic()
            if received_signals or time.monotonic() > last_heard_s + MOST_SILENT_S:
                break
    # jobs.supervisor.step_task gives its ranks GRACE_S seconds to end, and then needs a moment to end leftover processes
    if exit_code is None:
        exit_code = node_processes.end_process(task_process, signal.SIGTERM, node_processes.GRACE_S + 5)
    return 128 - exit_code if exit_code < 0 else exit_code


def _wait_for_lock(lock_descriptor: int) -> None:
    """Wait for the lock of this node until another run on the node has ended. Raises ShardlabError if that run does not end."""
    deadline_s = time.monotonic() + MOST_BUSY_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.2)
    holder = node_lock.find_lock_holder(lock_descriptor)[1]
    raise ShardlabError(f"{socket.gethostname()}: another run, which was not started from here, uses this node: {holder}.")


def _find_free_address(host: str) -> str:
    """An address of this node with a free port, as HOST:PORT. host: the node's address in the inventory. Raises
    RendezvousError."""
    try:
        family, socket_kind, _, _, address_to_bind = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket_kind) as listener:
            listener.bind(address_to_bind)
            address, port = listener.getsockname()[:2]
    except OSError as error:
        raise RendezvousError(f"{socket.gethostname()}: cannot listen at its address {host} ({error.strerror}).") from None
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"


def _write_line(line_words: str) -> None:
    """Write a line to standard output. Python's buffer is not used: a thread that cannot write would hold the lock of the
    buffer when this process ends."""
    unwritten_bytes = memoryview(f"{LINE_PREFIX} {line_words}\n".encode())
    with _WRITE_LOCK, contextlib.suppress(OSError):  # the connection is lost, so nobody reads the line
        while unwritten_bytes:
            unwritten_bytes = unwritten_bytes[os.write(sys.stdout.fileno(), unwritten_bytes) :]


if __name__ == "__main__":
    sys.exit(console.run_command(main))
