"""An SSH server inside the process of the test, which needs no root and no installed sshd."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
import pytest


class Door(paramiko.ServerInterface):
    """Refuses every login, or accepts every key and executes the commands in the shell of this machine.

    accepts: whether logins are accepted.
    """

    def __init__(self, accepts: bool) -> None:
        self._accepts = accepts

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL if self._accepts else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=_execute, args=(channel, command), daemon=True).start()
        return True


class SshServer:
    """An SSH server at a free port of this machine. accepts: as for Door. key: the host key."""

    def __init__(self, *, accepts: bool) -> None:
        self.key = paramiko.ECDSAKey.generate()
        self._accepts = accepts
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def end(self) -> None:
        """Close all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        for transport in self._transports:
            transport.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            self._transports.append(transport)
            transport.add_server_key(self.key)
            try:
                transport.start_server(server=Door(self._accepts))
            except (EOFError, paramiko.SSHException):  # the client rejected the host key of the server
                continue


def make_home(folder: Path, monkeypatch: Any) -> Path:
    """Make `folder` the home folder of the client, without known hosts and without a configuration of SSH. Returns the path of
    a new private key. Skips the test if OpenSSH is not installed."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed here")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    identity = folder / "identity"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", identity], check=True)
    return identity


def _execute(channel: paramiko.Channel, command: bytes) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", os.fsdecode(command)], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        streams = [(process.stdout, channel.sendall), (process.stderr, channel.sendall_stderr)]
        threads = [threading.Thread(target=_pass_on, args=(partial(stream.read, 1 << 16), send)) for stream, send in streams]
        for thread in threads:
            thread.start()
        with contextlib.suppress(BrokenPipeError):
            _pass_on(partial(channel.recv, 1 << 16), process.stdin.write)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for thread in threads:
            thread.join()
    channel.send_exit_status(process.returncode)
    channel.close()


def _pass_on(read: Callable[[], bytes], write: Callable[[bytes], object]) -> None:
    for part in iter(read, b""):
        write(part)
