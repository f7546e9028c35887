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

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that contains trainers/ and shardlab/
# Bytes of the folder: sockaddr_un holds a path of 107 bytes, and a random name and the name of the socket are added.
MOST_FOLDER_BYTES = 107 - len("-01234567/0123456789abcdef.sock")
MOST_MESSAGE_BYTES = 4 * 2**20  # bytes of a message; it contains an environment, which has at most 2 MiB on Linux


def find_socket_path() -> Path:
    """The path of the socket for this interpreter, its packages and this source. Raises ShardlabError."""
    return choose_socket_folder() / f"{compute_warm_parent_key()}.sock"


def compute_warm_parent_key() -> str:
    """A digest of this interpreter, its installed packages and this source, which is the name of the warm parent's socket.

    The warm parent is the process that has imported torch and forks the ranks of each run.

    If the interpreter, a package or the source changes, the name of the socket changes, so a run always uses the code on disk.
    The path of the source is not part of the digest: runs of several workspaces, each with its own copy of the same source, use
    the same warm parent.
    """
    digest = hashlib.sha256(json.dumps([sys.executable, sys.version, host.read_package_versions()]).encode())
    for package in ("shardlab", "trainers"):
        for path in sorted((SOURCE_ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(SOURCE_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def choose_socket_folder() -> Path:
    """The user's own folder for sockets, which no other user can enter. It is created if it does not exist. It is in /tmp if
    the path of a socket would be too long in the temporary folder.

    Raises ShardlabError.
    """
    folder_name, temporary_folder = f"shardlab-{os.getuid()}", Path(tempfile.gettempdir())
    if len(os.fsencode(temporary_folder / folder_name)) > MOST_FOLDER_BYTES:
        temporary_folder = Path("/tmp")
    runtime_folder = Path(os.environ.get("XDG_RUNTIME_DIR") or temporary_folder)
    is_closed = own_folder.is_our_folder(runtime_folder, 0o022)  # 0o022: others can write
    is_usable = is_closed and len(os.fsencode(runtime_folder / folder_name)) <= MOST_FOLDER_BYTES
    if is_usable:
        with contextlib.suppress(OSError):  # it may be full
            return own_folder.make_own_folder(runtime_folder, folder_name)
    try:
        return own_folder.make_own_folder(temporary_folder, folder_name)
    except OSError as error:
        raise ShardlabError(
            f"{temporary_folder}: no folder can be made there that only user {os.getuid()} can enter ({error}), and "
            "the launcher fork needs such a folder for its socket. Set XDG_RUNTIME_DIR to a folder of your own with mode 0700."
        ) from error


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection runs as this user. The kernel reports its user id."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())


def send_message(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send one message as a line of JSON. descriptors: open files to send with it."""
    message_line = json.dumps(message).encode() + b"\n"
    sent_bytes = socket.send_fds(connection, [message_line], descriptors) if descriptors else 0
    connection.sendall(message_line[sent_bytes:])


def receive_message(connection: socket.socket, descriptor_count: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a message. Returns (the message, or None if the other end has closed the connection; the open files that were
    sent with the message).

    descriptor_count: number of open files to expect. If it is 0, the message is read byte by byte, so that the message after it
    stays in the socket.
    """
    message_bytes, open_descriptors = b"", list[int]()
    while not message_bytes.endswith(b"\n"):
        if len(message_bytes) > MOST_MESSAGE_BYTES:
            raise InputError(f"the message is longer than {MOST_MESSAGE_BYTES} bytes.")
        try:
            if descriptor_count:
                received_bytes, new_descriptors, _, _ = socket.recv_fds(connection, 2**16, descriptor_count)
                open_descriptors += new_descriptors
            else:
                received_bytes = connection.recv(1)
        except ConnectionResetError:
            received_bytes = b""
        if not received_bytes:
            return None, open_descriptors
        message_bytes += received_bytes
    message = json.loads(message_bytes)
    return (message if isinstance(message, dict) else None), open_descriptors


def find_lock_path(socket_file: Path) -> Path:
    return socket_file.with_suffix(".lock")


def find_log_path(socket_file: Path) -> Path:
    return socket_file.with_suffix(".log")


def remove_socket(socket_file: Path) -> None:
    """Remove a socket, its lock and its log."""
    for path in (socket_file, find_lock_path(socket_file), find_log_path(socket_file)):
        path.unlink(missing_ok=True)
