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
from shardlab.terminal.command_start import INTERRUPTED
from trainers.forking import address

START_LIMIT_S = 300  # time to import torch and transformers from a slow disk whose files are not cached
LOOK_EVERY_S = 0.02
# The environment variables that the warm parent gets from the client that starts it. The ranks of a run get the whole
# environment of the client that requests the run.
INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "USER", "XDG_RUNTIME_DIR")


def run(path: Path) -> int:
    """Train the run whose folder is `path` with forked ranks on this machine's CPU, and return its exit code.

    If this process ends for any reason, the run ends too. Raises InputError and ShardlabError.
    """
    run_dir = RunDir(path.absolute())
    world_size = run_dir.read_run().world.world_size
    sys.stderr.write("rehearsal: ranks are forked on this machine's CPU; their times say nothing about a GPU.\n")
    sys.stderr.flush()
    request = {
        "run_dir": str(run_dir.path),
        "world_size": world_size,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
    }
    where = address.socket_path()
    try:
        while True:
            with _connect(where) as connection:
                try:
                    address.send(connection, request, [1, 2])
                    begun, _ = address.receive(connection)
                except (BrokenPipeError, ConnectionResetError):
                    begun = None
                if begun is None:
                    continue  # the warm parent, which was idle, has just ended; the run has not begun, so try again
                ended, _ = address.receive(connection)
                if ended is None:
                    raise ShardlabError(f"{run_dir.path}: the parent process of its ranks was killed, and so were the ranks.")
                return int(ended["exit_code"])
    except KeyboardInterrupt:
        return INTERRUPTED


def _connect(where: Path) -> socket.socket:
    """A connection to the warm parent, which is started if needed. Raises ShardlabError if it cannot be started."""
    started: subprocess.Popen[bytes] | None = None
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(where))
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            connection.close()
        else:
            if address.same_user(connection):
                return connection
            connection.close()
            raise ShardlabError(f"{where}: a process of another user answers at this socket.")
        if started is not None and started.poll() not in (None, 0):
            raise ShardlabError(f"the warm parent ended with code {started.returncode}; see {address.log_path(where)}.")
        if (started is None or started.poll() == 0) and not _being_started(where):
            started = _start(where)
        time.sleep(LOOK_EVERY_S)
    raise ShardlabError(f"the warm parent did not answer within {START_LIMIT_S} s; see {address.log_path(where)}.")


def _being_started(where: Path) -> bool:
    """Whether a warm parent is running. It holds a lock from its start on, but answers only after it has imported all
    modules."""
    with files.open_append(address.lock_path(where)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _start(where: Path) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    with files.open_append(address.log_path(where)) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainers", "warm", str(where)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=address.SOURCE,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # so that Ctrl-C in this terminal does not end the warm parent
        )
