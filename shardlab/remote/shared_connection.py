"""The SSH connection to a login node that provision, jobs and collect share, so that a site asks for a second factor only once.

OpenSSH's own client keeps the connection open in the background (ControlMaster, ControlPersist). Other commands reach the
connection through a socket. The socket is in a folder that only this user can open, because everybody who can open the socket
can log in.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.files import files, own_folder

KEEP_OPEN = "4h"  # how long the connection stays open after the last command that used it
LOGIN_S = 300.0  # time limit of a login; long, because a person may have to find a hardware token or a phone
# The longest path of the folder of the sockets, in bytes. The path of a socket has at most 107 bytes, and OpenSSH adds 58 bytes
# to the path of the folder.
MAX_FOLDER_BYTES = 49
TEMPORARY = Path("/tmp")  # in place of the user's cache, if the path of that is longer


class NoLogin(ShardlabError):
    """Raised if the login to a login node failed. The message says why."""


def socket_folder() -> Path:
    """The folder of the sockets, which only this user can open. The folder is made if it does not exist.

    Raises WorkspaceError.
    """
    cache = own_folder.cache_path("ssh")
    if len(os.fsencode(cache)) > MAX_FOLDER_BYTES:
        with files.as_workspace_error("make"):
            return own_folder.make_own_folder(TEMPORARY, f"shardlab-ssh-{os.geteuid()}")
    files.make_folder(cache.parent)
    with files.as_workspace_error("close to other users"):
        if own_folder.belongs_to_us(cache, 0):
            cache.chmod(0o700)
        return own_folder.make_own_folder(cache.parent, cache.name)


def connection_options() -> list[str]:
    """The options with which a command of OpenSSH uses the shared connection.

    If the connection is not open, a command with these options opens it, but only if the site asks for no password or code.
    """
    socket = str(socket_folder() / "%C")
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}", "-o", f"ControlPersist={KEEP_OPEN}"]


def is_open(command: Sequence[str]) -> bool:
    """Whether the shared connection is open, so that a command needs no login. command: as in `open_connection`."""
    check_command = [*_before_host(command), "-O", "check", *_host_words(command)]
    return subprocess.run(check_command, capture_output=True, check=False).returncode == 0


def open_connection(command: Sequence[str], host: str) -> None:
    """Open the shared connection if it is not open. The user answers on the terminal if the site asks for a password or code.

    command: a command of OpenSSH as a list of words: `ssh` with `connection_options()`, then `--` and the host.
    host: the name of the host for messages.
    Raises NoLogin.
    """
    words = list(command)
    if is_open(words):
        return
    may_ask = sys.stdin.isatty()
    words_before_host, host_words = _before_host(words), _host_words(words)
    # ssh uses the first value of an option, so BatchMode comes before the options in `command`.
    login = [
        words_before_host[0],
        "-o",
        f"BatchMode={'no' if may_ask else 'yes'}",
        *words_before_host[1:],
        "-f",
        "-N",
        *host_words,
    ]
    with tempfile.TemporaryFile() as errors:  # not a pipe, which the ssh in the background would keep open
        try:
            exit_code: int | None = subprocess.run(login, stdout=errors, stderr=errors, timeout=LOGIN_S, check=False).returncode
        except subprocess.TimeoutExpired:
            exit_code = None
        errors.seek(0)
        error_lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    if exit_code is None:
        raise NoLogin(f"{host}: the login did not finish within {LOGIN_S:g} s.")
    if exit_code != 0:
        reason = error_lines[-1].strip().rstrip(".") if error_lines else f"ssh ended with code {exit_code}"
        if may_ask or "denied" not in reason:
            raise NoLogin(f"{host}: {reason}.")
        manual_login = shlex.join(login).replace("BatchMode=yes", "BatchMode=no")
        raise NoLogin(f"{host}: {reason}. If the login needs a password or a code, log in once on a terminal: {manual_login}")


def _before_host(words: Sequence[str]) -> list[str]:
    return list(words[: words.index("--")])


def _host_words(words: Sequence[str]) -> list[str]:
    return list(words[words.index("--") :])
