"""Starts one task on each node of a run over SSH, as srun does in a Slurm job. If a task fails, all tasks are ended.

    python -m jobs.ssh.step RUN_DIR -- COMMAND...

The scheduler names the nodes in the variable SHARDLAB_NODES; the inventory of the workspace has their addresses. The exit code
is 0 if all tasks returned 0, otherwise the exit code of the first task that failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

import msgspec

from jobs.node import node_processes
from jobs.node.rendezvous import NODES_VARIABLE, RENDEZVOUS_ID_VARIABLE, RENDEZVOUS_VARIABLE
from jobs.ssh import record_mirror
from jobs.ssh.node_task import BEAT_INTERVAL_S, LINE_PREFIX, START_S, TOKEN_FILE, TaskRequest
from jobs.ssh.record_mirror import RecordChange, RecordCopies
from shardlab.cluster.address import Address
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.remote.ssh_command import make_ssh_command, wrap_for_any_shell
from shardlab.runs import placement
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.workspace import inventory
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

NODE_LOST_EVENT = "node_lost"  # the event that names the node that the run lost
# seconds that the supervisor gives this process to end; the tasks on the nodes get a little less time
MOST_END_S = 2 * node_processes.GRACE_S
MOST_SILENT_S = 60.0  # seconds in which a node must report its end after another node failed; ssh notices lost nodes earlier
EXIT_CODE_PATTERN = re.compile(r"[0-9]{1,3}")
NO_LOGIN_WORDS = "Permission denied"  # OpenSSH's words if a node does not accept the login
# Variables that are not sent to other nodes, because they describe the login on this node. All other variables are sent, as in
# Slurm.
OWN_VARIABLES = (
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PWD",
    "OLDPWD",
    "HOSTNAME",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    NODES_VARIABLE,
    RENDEZVOUS_VARIABLE,
)
OWN_VARIABLE_PREFIXES = ("SSH_", "XDG_", "DBUS_", "SUDO_")


class NodeLost(ShardlabError):
    """Raised if the connection to a node broke, or if the node cannot be reached. node: the name of the node."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node


class NodeSession:
    """The SSH session of one node's task."""

    def __init__(self, node: InventoryNode, run_dir: RunDir, record_copies: RecordCopies) -> None:
        self.node = node
        self._copies = record_copies
        self.exit_code: int | None = None  # the exit code that the task reported
        self.rendezvous_address = ""  # the address that the node offers for the rendezvous; "" until it is ready
        self._log_path, self._unread = (log_path := run_dir.log / f"ssh.{node.name}.log"), bytearray()
        log_path.unlink(missing_ok=True)  # remove the log of an earlier start
        self.process = subprocess.Popen(
            make_login_argv(node, log_path, f"exec {shlex.quote(node.python or '')} -P -m jobs.ssh.node_task"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that a signal for the process group of this process does not end ssh
            preexec_fn=node_processes.die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self.stdout = self.process.stdin, self.process.stdout

    def send(self, line: bytes) -> None:
        """Send a line. A broken connection causes no error here; it is noticed when the output of ssh ends."""
        with contextlib.suppress(OSError):
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def ask_to_end(self) -> None:
        """Ask the node to end the task, and to report its exit code."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read_output(self) -> bool:
        """Read and handle output of the node. Returns False at the end of the output. Raises ShardlabError if the node sends a
        line that is not valid."""
        read_bytes = os.read(self.stdout.fileno(), 1 << 16)
        self._unread += read_bytes
        if b"\n" in read_bytes:
            *lines, unfinished_line = self._unread.split(b"\n")
            self._unread = unfinished_line
            for line in lines:
                self._handle_line(line.decode("utf-8", "replace"))
        elif len(self._unread) > record_mirror.MOST_LINE_BYTES:
            raise ShardlabError(f"{self.node.name}: sent a line of more than {record_mirror.MOST_LINE_BYTES} bytes.")
        return read_bytes != b""

    def _handle_line(self, line: str) -> None:
        prefix, _, message = line.partition(" ")
        keyword, _, value = message.partition(" ")
        if prefix != LINE_PREFIX:
            return
        if keyword == "ready":
            self.rendezvous_address = value
        elif keyword == "exit" and EXIT_CODE_PATTERN.fullmatch(value):
            self.exit_code = int(value)
        elif keyword == "record":
            try:
                change = msgspec.json.decode(value, type=RecordChange)
            except DECODE_FAULTS as error:
                raise ShardlabError(f"{self.node.name}: sent a record that cannot be read: {error}.") from None
            self._copies.apply_change(self.node.name, change)

    def make_end_error(self) -> ShardlabError:
        """The error for a session that ended although its task did not report its end."""
        exit_code = self.process.wait()
        if exit_code != 255 and exit_code >= 0:
            return ShardlabError(f"{self.node.name}: its task ended with exit code {exit_code}; see log/job.log.")
        ssh_error = read_last_ssh_line(self._log_path)
        if NO_LOGIN_WORDS in ssh_error:
            return ShardlabError(
                f"{gethostname()} cannot log in to {self.node.name} over SSH: {ssh_error}. {BETWEEN_NODES_HINT}"
            )
        return NodeLost(self.node.name, f"the connection broke: {ssh_error}" if ssh_error else "the connection broke")


BETWEEN_NODES_HINT = (
    "Nodes without Slurm need SSH to each other: set ssh.between_nodes: true in the cluster file, and run: provision"
)


def make_login_argv(node: InventoryNode, log_path: Path, script: str, start_mark: str = "") -> list[str]:
    """The argv with which this node runs a script of sh on another node. ssh writes its own errors into `log_path`. start_mark:
    as for `wrap_for_any_shell`."""
    ssh_words = make_ssh_command(Address(node.address_between_nodes, node.port, node.user))
    return [ssh_words[0], "-E", str(log_path), *ssh_words[1:], wrap_for_any_shell(script, start_mark)]


def read_last_ssh_line(log_path: Path) -> str:
    """The last line that ssh wrote into its log, or ''."""
    log_lines = files.read(log_path).decode(errors="replace").split("\n") if log_path.exists() else []
    return next((line.strip().rstrip(".") for line in reversed(log_lines) if line.strip()), "")


class SshStep:
    """The tasks of one run on its nodes."""

    def __init__(self, run_dir: RunDir, run: Run, nodes: Sequence[InventoryNode], command: Sequence[str]) -> None:
        self._is_told_to_end = False
        record_copies = RecordCopies(run_dir.path)
        self._sessions = [NodeSession(node, run_dir, record_copies) for node in nodes]
        self._open_sessions = list(self._sessions)
        self._selector = selectors.DefaultSelector()
        for session in self._sessions:
            self._selector.register(session.stdout, selectors.EVENT_READ, session)
        own_variable_names = {name for name in os.environ if name in OWN_VARIABLES or name.startswith(OWN_VARIABLE_PREFIXES)}
        environment = {name: value for name, value in os.environ.items() if name not in own_variable_names}
        environment[RENDEZVOUS_ID_VARIABLE] = f"{run.run_id}-{time.time_ns()}"
        for node_number, session in enumerate(self._sessions):
            request = TaskRequest(
                folder=str(run_dir.path),
                launcher_argv=list(command),
                environment=environment,
                node_number=node_number,
                node_addresses=[node.address_between_nodes for node in nodes],
                gpu_count=run.world.nproc_per_node,
                folder_token=files.read(run_dir.path / TOKEN_FILE).decode(errors="replace") if run.separate_folders else "",
                packages_digest=run.packages if run.separate_folders else None,
            )
            session.send(msgspec.json.encode(request))

    def run(self) -> int:
        """Run the tasks until they end; return the exit code. Raises NodeLost, and ShardlabError if a task cannot start."""
        signal.signal(signal.SIGTERM, self._note_signal)
        try:
            deadline_s = time.monotonic() + START_S
            while not all(session.rendezvous_address for session in self._sessions):
                self._read_sessions()
                if time.monotonic() > deadline_s:
                    late_nodes = ", ".join(session.node.name for session in self._sessions if not session.rendezvous_address)
                    raise ShardlabError(f"{late_nodes}: not ready after {START_S} s.")
                if self._is_told_to_end:
                    return 128 + signal.SIGTERM
            for session in self._sessions:
                session.send(self._sessions[0].rendezvous_address.encode())
            self._wait_until_ended()
            # a task may have failed because another node was lost, as ssh notices later
            if failed_exit_code := self._find_first_failure():
                self._end_tasks(MOST_SILENT_S, may_be_lost=True)
                return failed_exit_code
            return 128 + signal.SIGTERM if self._is_told_to_end else 0
        finally:
            self._end_tasks(MOST_END_S - 2)
            for session in self._open_sessions:
                session.process.kill()

    def _wait_until_ended(self) -> None:
        """Wait until all tasks have ended, a task has failed, or this process was told to end."""
        next_beat_s = 0.0
        while self._open_sessions and not self._is_told_to_end and not self._find_first_failure():
            if time.monotonic() > next_beat_s:
                next_beat_s = time.monotonic() + BEAT_INTERVAL_S
                for session in self._open_sessions:
                    session.send(b"")
            self._read_sessions()

    def _read_sessions(self, *, is_lost: bool = True) -> None:
        """Read the output of the nodes. If a session ended without an exit code, raises its error, unless `is_lost` is
        false."""
        for key, _ in self._selector.select(timeout=0.2):
            session: NodeSession = key.data
            if session.read_output():
                continue
            self._selector.unregister(session.stdout)
            self._open_sessions.remove(session)
            if session.exit_code is None and is_lost:
                raise session.make_end_error()

    def _find_first_failure(self) -> int:
        return next((session.exit_code for session in self._sessions if session.exit_code), 0)

    def _end_tasks(self, limit_s: float, *, may_be_lost: bool = False) -> None:
        """End all tasks, and wait up to limit_s seconds for their ends. may_be_lost: whether to raise NodeLost for a node that
        does not report the end of its task."""
        for session in self._open_sessions:
            session.ask_to_end()
        deadline_s = time.monotonic() + limit_s
        while self._open_sessions and time.monotonic() < deadline_s and not (may_be_lost and self._is_told_to_end):
            self._read_sessions(is_lost=may_be_lost)
        if self._open_sessions and may_be_lost and not self._is_told_to_end:
            raise NodeLost(self._open_sessions[0].node.name, f"did not report the end of its task within {limit_s:g} s")

    def _note_signal(self, _number: int, _frame: object) -> None:
        self._is_told_to_end = True


def read_chosen_nodes(run_dir: RunDir, run: Run) -> list[InventoryNode]:
    """The nodes that the scheduler chose for a run. Raises InputError."""
    if NODES_VARIABLE not in os.environ:
        raise InputError(f"{NODES_VARIABLE} is not set; the runner of the scheduler sets it.")
    inventory_nodes = inventory.read_inventory(Workspace(run_dir.path.parent.parent), run.cluster["name"]).nodes
    node_by_name = {node.name: msgspec.structs.replace(node, python=run.python or node.python) for node in inventory_nodes}
    return [node_by_name[name] for name in os.environ[NODES_VARIABLE].split(",")]


def main(argv: list[str]) -> int:
    """Run the tasks of the command line; return the exit code. argv: RUN_DIR -- COMMAND... Raises ShardlabError."""
    if len(argv) < 3 or argv[1] != "--":
        raise InputError("usage: python -m jobs.ssh.step RUN_DIR -- COMMAND...")
    run_dir = RunDir(Path(argv[0]).absolute())
    run = run_dir.read_run()
    nodes = read_chosen_nodes(run_dir, run)
    if run.separate_folders:
        run_dir.write_event("step", placement.PLACED_EVENT, nodes=[node.name for node in nodes])
    try:
        return SshStep(run_dir, run, nodes, argv[2:]).run()
    except NodeLost as node_lost_error:
        run_dir.write_event("step", NODE_LOST_EVENT, node=node_lost_error.node, why=str(node_lost_error))
        raise
    except ShardlabError as error:
        run_dir.write_event("step", "failed", why=str(error))
        raise


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:]), interrupted=None))
