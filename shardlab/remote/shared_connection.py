"""SSH connections that several commands share.

provision, jobs and collect share one connection to a login node, so that a site asks for a second factor only once. provision
has a connection of its own to each node, and closes it at its end. OpenSSH's own client keeps a connection open in the
background (ControlMaster, ControlPersist). Commands reach the connection through a socket. The socket is in a folder that only
this user can open, because everybody who can open the socket can log in.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.files import files, own_folder
from shardlab.remote import login_failure

KEEP_OPEN = "4h"  # how long the connection to a login node stays open after the last command that used it
KEEP_OWN_OPEN_S = 60.0  # the same for a connection of one process, which closes it unless the process is killed
LOGIN_S = 300.0  # time limit of a login; long, because a person may have to find a hardware token or a phone
SILENT_LOGIN_S = 40.0  # the same if nobody can be asked
JUMP_FAILED = "closed by UNKNOWN port 65535"  # what OpenSSH says if the connection to a proxy jump failed
# The longest path of the folder of the sockets, in bytes. The path of a socket has at most 107 bytes, and OpenSSH adds 58 bytes
# to the path of the folder.
MAX_FOLDER_BYTES = 49
SHORT_FOLDER = Path("/tmp")  # in place of the user's cache, if the path of that is longer


class NoLogin(ShardlabError):
    """Raised if the login to a login node failed. The message says why."""


def make_socket_folder() -> Path:
    """The folder of the sockets, which only this user can open. The folder is made if it does not exist.

    Raises WorkspaceError.
    """
    ssh_cache = own_folder.make_cache_path("ssh")
    if len(os.fsencode(ssh_cache)) > MAX_FOLDER_BYTES:
        with files.as_workspace_error("make"):
            return own_folder.make_own_folder(SHORT_FOLDER, f"shardlab-ssh-{os.geteuid()}")
    files.make_folder(ssh_cache.parent)
    with files.as_workspace_error("close to other users"):
        if own_folder.is_our_folder(ssh_cache, 0):
            ssh_cache.chmod(0o700)
        return own_folder.make_own_folder(ssh_cache.parent, ssh_cache.name)


def make_connection_options() -> list[str]:
    """The options with which a command of OpenSSH uses the shared connection.

    If the connection is not open, a command with these options opens it, but only if the site asks for no password or code.
    """
    socket_path = str(make_socket_folder() / "%C")
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket_path}", "-o", f"ControlPersist={KEEP_OPEN}"]


def make_own_connection_options() -> list[str]:
    """The options with which commands of OpenSSH use a new connection of this process, after `open_connection` opened it."""
    socket_path = make_socket_folder() / secrets.token_hex(8)
    return ["-o", "ControlMaster=no", "-o", f"ControlPath={socket_path}", "-o", f"ControlPersist={KEEP_OWN_OPEN_S:g}"]


def is_connection_open(ssh_words: Sequence[str]) -> bool:
    """Whether the shared connection is open, so that a command needs no login. ssh_words: as in `open_connection`."""
    return _control_connection(ssh_words, "check") == 0


def close_connection(ssh_words: Sequence[str]) -> None:
    """Close the shared connection; commands that use it end. ssh_words: as in `open_connection`."""
    _control_connection(ssh_words, "exit")


def _control_connection(ssh_words: Sequence[str], request: str) -> int:
    control_words = [*_take_words_before_host(ssh_words), "-O", request, *_take_host_words(ssh_words)]
    return subprocess.run(control_words, capture_output=True, check=False).returncode


def open_connection(ssh_words: Sequence[str], host: str, *, may_ask: bool = True) -> None:
    """Open the shared connection if it is not open. The user answers on the terminal if the site asks for a password or code.

    ssh_words: a command of OpenSSH as a list of words: `ssh` with options of this module, then `--` and the host.
    host: the name of the host for messages. may_ask: whether the user may be asked if there is a terminal.
    Raises NoLogin.
    """
    if is_connection_open(ssh_words):
        return
    may_prompt = may_ask and sys.stdin.isatty()
    (ssh_program, *options), host_words = _take_words_before_host(ssh_words), _take_host_words(ssh_words)

    def make_login_words(batch_mode: str, *further_options: str) -> list[str]:
        # ssh uses the first value of an option, so these come before the options in `ssh_words`.
        return [ssh_program, "-f", "-N", "-o", f"BatchMode={batch_mode}", *further_options, *options, *host_words]

    login_words = make_login_words("no" if may_prompt else "yes", *login_failure.LOG_LEVEL, "-o", "ControlMaster=auto")
    limit_s = LOGIN_S if may_prompt else SILENT_LOGIN_S
    try:
        exit_code, ssh_messages = _run_ssh(login_words, limit_s)
        if exit_code == 0:
            return
        if not may_prompt and JUMP_FAILED in ssh_messages:
            # For a connection that stays open, OpenSSH drops the messages of proxy jumps.
            login_words = [ssh_program, "-o", "ControlPath=none", *login_failure.LOG_LEVEL, *options, *host_words, "true"]
            ssh_messages = _run_ssh(login_words, limit_s)[1]
    except subprocess.TimeoutExpired:
        raise NoLogin(f"{host}: the login did not finish within {limit_s:g} s.") from None
    keeps_host_keys = not any('"/dev/null"' in option for option in options)
    sentence = login_failure.describe_login_failure(host, ssh_messages, keeps_host_keys=keeps_host_keys)
    if may_prompt or not may_ask or "denied" not in sentence:
        raise NoLogin(sentence)
    manual_login = shlex.join(make_login_words("no"))
    raise NoLogin(f"{sentence} If the login needs a password or a code, log in once on a terminal: {manual_login}")


def _run_ssh(ssh_words: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run ssh. Returns (exit code, its messages). Raises TimeoutExpired."""
    with tempfile.TemporaryFile() as error_file:  # not a pipe, which the ssh in the background would keep open
        exit_code = subprocess.run(ssh_words, stdout=error_file, stderr=error_file, timeout=limit_s, check=False).returncode
        error_file.seek(0)
        return exit_code, error_file.read().decode("utf-8", "replace")


def _take_words_before_host(ssh_words: Sequence[str]) -> list[str]:
    return list(ssh_words[: ssh_words.index("--")])


def _take_host_words(ssh_words: Sequence[str]) -> list[str]:
    return list(ssh_words[ssh_words.index("--") :])
