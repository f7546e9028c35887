"""The command that a job with the launcher `fork` executes: it requests a run from the warm parent, and starts the warm parent
if needed.

This command never imports torch, so that it starts fast.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.runs.rundir import RunDir
from shardlab.terminal.command_start import INTERRUPTED_CODE
from trainers.forking import address

START_LIMIT_S = 300  # time to import torch and transformers from a slow disk whose files are not cached
POLL_INTERVAL_S = 0.02
# The environment variables that the warm parent gets from the client that starts it. The ranks of a run get the whole
# environment of the client that requests the run.
INHERITED_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "USER", "XDG_RUNTIME_DIR")


def run_forked(run_folder: Path) -> int:
    """Train the run whose folder is `run_folder` with forked ranks on this machine's CPU, and return its exit code.

    If this process ends for any reason, the run ends too. Raises InputError and ShardlabError.
    """
    run_dir = RunDir(run_folder.absolute())
    world_size = run_dir.read_run().world.world_size
    sys.stderr.write("rehearsal: ranks are forked on this machine's CPU; their times say nothing about a GPU.\n")
    sys.stderr.flush()
    request = {
        "run_dir": str(run_dir.path),
        "world_size": world_size,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
    }
    socket_file = address.find_socket_path()
    try:
        while True:
            with _connect_to_warm_parent(socket_file) as connection:
                try:
                    address.send_message(connection, request, [1, 2])
                    start_message, _ = address.receive_message(connection)
                except (BrokenPipeError, ConnectionResetError):
                    start_message = None
                if start_message is None:
                    continue  # the warm parent, which was idle, has just ended; the run has not begun, so try again
                end_message, _ = address.receive_message(connection)
                if end_message is None:
                    raise ShardlabError(f"{run_dir.path}: the parent process of its ranks was killed, and so were the ranks.")
                return int(end_message["exit_code"])
    except KeyboardInterrupt:
        return INTERRUPTED_CODE


def _connect_to_warm_parent(socket_file: Path) -> socket.socket:
    """A connection to the warm parent, which is started if needed. Raises ShardlabError if it cannot be started."""
    warm_parent: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(socket_file))
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            connection.close()
        else:
            if address.is_same_user(connection):
                return connection
            connection.close()
            raise ShardlabError(f"{socket_file}: a process of another user answers at this socket.")
        if warm_parent is not None and warm_parent.poll() not in (None, 0):
            raise ShardlabError(
                f"the warm parent ended with code {warm_parent.returncode}; see {address.find_log_path(socket_file)}."
            )
        if (warm_parent is None or warm_parent.poll() == 0) and not _is_starting(socket_file):
            warm_parent = _start_warm_parent(socket_file)
        time.sleep(POLL_INTERVAL_S)
    raise ShardlabError(f"the warm parent did not answer within {START_LIMIT_S} s; see {address.find_log_path(socket_file)}.")


def _is_starting(socket_file: Path) -> bool:
    """Whether a warm parent is running. It holds a lock from its start on, but answers only after it has imported all
    modules."""
    with files.open_append(address.find_lock_path(socket_file)) as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _start_warm_parent(socket_file: Path) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    with files.open_append(address.find_log_path(socket_file)) as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "trainers", "warm", str(socket_file)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            cwd=address.SOURCE_ROOT,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # so that Ctrl-C in this terminal does not end the warm parent
        )
