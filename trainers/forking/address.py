"""The path of the warm parent's socket, and the messages between the warm parent and its clients.

The path depends on the code, so that a client never reaches a warm parent with other code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardlab.errors import InputError, ShardlabError
from shardlab.files import own_folder
from shardlab.hardware import host

SOURCE = Path(__file__).resolve().parents[2]  # the folder that contains trainers/ and shardlab/
# Bytes of the folder: sockaddr_un holds a path of 107 bytes, and a random name and the name of the socket are added.
LONGEST_FOLDER = 107 - len("-01234567/0123456789abcdef.sock")
LONGEST_LINE = 4 * 2**20  # bytes of a message; it contains an environment, which has at most 2 MiB on Linux


def socket_path() -> Path:
    """The path of the socket for this interpreter, its packages and this source. Raises ShardlabError."""
    return socket_folder() / f"{warm_parent_key()}.sock"


def warm_parent_key() -> str:
    """A digest of this interpreter, its installed packages and this source, which is the name of the warm parent's socket.

    The warm parent is the process that has imported torch and forks the ranks of each run.

    If the interpreter, a package or the source changes, the name of the socket changes, so a run always uses the code on disk.
    The path of the source is not part of the digest: runs of several workspaces, each with its own copy of the same source, use
    the same warm parent.
    """
    digest = hashlib.sha256(json.dumps([sys.executable, sys.version, host.packages()]).encode())
    for package in ("shardlab", "trainers"):
        for path in sorted((SOURCE / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(SOURCE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def socket_folder() -> Path:
    """The user's own folder for sockets, which no other user can enter. It is created if it does not exist. It is in /tmp if
    the path of a socket would be too long in the temporary folder.

    Raises ShardlabError.
    """
    name, temporary = f"shardlab-{os.getuid()}", Path(tempfile.gettempdir())
    if len(os.fsencode(temporary / name)) > LONGEST_FOLDER:
        temporary = Path("/tmp")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or temporary)
    is_closed = own_folder.belongs_to_us(runtime, 0o022)  # 0o022: others can write
    is_usable = is_closed and len(os.fsencode(runtime / name)) <= LONGEST_FOLDER
    if is_usable:
        with contextlib.suppress(OSError):  # it may be full
            return own_folder.make_own_folder(runtime, name)
    try:
        return own_folder.make_own_folder(temporary, name)
    except OSError as error:
        raise ShardlabError(
            f"{temporary}: no folder can be made there that only user {os.getuid()} can enter ({error}), and the launcher fork "
            "needs such a folder for its socket. Set XDG_RUNTIME_DIR to a folder of your own with mode 0700."
        ) from error


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection runs as this user. The kernel reports its user id."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send one message as a line of JSON. descriptors: open files to send with it."""
    line = json.dumps(message).encode() + b"\n"
    sent_bytes = socket.send_fds(connection, [line], descriptors) if descriptors else 0
    connection.sendall(line[sent_bytes:])


def receive(connection: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a message. Returns (the message, or None if the other end has closed the connection; the open files that were
    sent with the message).

    descriptors: number of open files to expect. If it is 0, the message is read byte by byte, so that the message after it
    stays in the socket.
    """
    raw, open_descriptors = b"", list[int]()
    while not raw.endswith(b"\n"):
        if len(raw) > LONGEST_LINE:
            raise InputError(f"the message is longer than {LONGEST_LINE} bytes.")
        try:
            if descriptors:
                part, new_descriptors, _, _ = socket.recv_fds(connection, 2**16, descriptors)
                open_descriptors += new_descriptors
            else:
                part = connection.recv(1)
        except ConnectionResetError:
            part = b""
        if not part:
            return None, open_descriptors
        raw += part
    message = json.loads(raw)
    return (message if isinstance(message, dict) else None), open_descriptors


def lock_path(socket_file: Path) -> Path:
    return socket_file.with_suffix(".lock")


def log_path(socket_file: Path) -> Path:
    return socket_file.with_suffix(".log")


def remove_socket(socket_file: Path) -> None:
    """Remove a socket, its lock and its log."""
    for path in (socket_file, lock_path(socket_file), log_path(socket_file)):
        path.unlink(missing_ok=True)
