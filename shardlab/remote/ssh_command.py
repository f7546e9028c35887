"""Makes the command lines of OpenSSH for another machine, with the seconds after which a connection has failed or is lost.

The user's OpenSSH makes every connection, with the user's configuration. Only settings that would break the commands of a
program are replaced, such as RemoteCommand. Host keys are compared with the file of the workspace, with the files that the
user's configuration names, and with the global files. If the key of a machine is unknown, the login is refused, unless the
cluster file has `host_keys: accept-new`. If the key has changed, the login is always refused.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path

from shardlab.cluster.address import Address
from shardlab.remote import proxy_jump, shared_connection
from shardlab.remote.proxy_jump import JumpHost

CONNECT_S = 10.0  # time limit of a connection
KEEPALIVE_S = 15  # seconds between two keepalive messages; the connection is given up after three messages without an answer
CONNECTION_FAILED = 255  # the exit code of ssh if the connection failed
_FILE_SEPARATOR = re.compile(r" (?=[/~%$]|none$)")  # between two files in the output of `ssh -G`, which has no quotes


def make_ssh_command(address: Address, *, terminal: bool = False, uses_own_connection: bool = False) -> list[str]:
    """An `ssh` command, as a list of words, that logs in to a machine and never asks for input.

    The caller adds one word: what the shell there executes, made by `wrap_for_any_shell`. terminal: whether the command needs a
    terminal. uses_own_connection: whether the command uses a connection that `shared_connection.open_connection` opened with
    it.
    """
    target_host = JumpHost(address.host, address.user, address.port)
    ssh_settings = proxy_jump.read_settings(target_host)
    ssh_words = ["ssh", "-q" if terminal else "-T", *_list_options(address, ssh_settings)]
    ssh_words += ["-o", f"ServerAliveInterval={KEEPALIVE_S}", "-o", "ClearAllForwardings=yes", *(["-t"] if terminal else [])]
    ssh_words += ["-i", _escape_path(address.identity)] if address.identity is not None else []
    if address.shared:  # OpenSSH itself follows the proxy jumps, because a jump may ask for a code
        return [*ssh_words, *shared_connection.make_connection_options(), *target_host.words]
    ssh_words += shared_connection.make_own_connection_options() if uses_own_connection else []
    jump_hosts = proxy_jump.find_jumps(ssh_settings)
    proxy_words = proxy_jump.make_proxy_option(jump_hosts, lambda jump: _list_options(address, proxy_jump.read_settings(jump)))
    return [*ssh_words, *proxy_words, *target_host.words]


def wrap_for_any_shell(script: str, start_mark: str = "", *, marks_errors: bool = True) -> str:
    """A command line that runs a sh script in any login shell: in base64, because csh allows no newline or `!` in quotes.

    start_mark: a word that the script prints on a line of both outputs before it begins. It proves that the script ran, and not
    only a startup file of the login shell, whose output comes before the mark; empty: no mark. marks_errors: whether it is also
    printed on standard error; not for a command whose errors a person reads as they come."""
    if start_mark:
        script = f"echo {start_mark}{f'; echo {start_mark} >&2' if marks_errors else ''}\n{script}"
    return f"exec sh -c 'eval \"$(echo {base64.b64encode(script.encode()).decode()} | base64 -d)\"'"


def describe_lost_command(host: str, code: int | None, stdout: str, stderr: str) -> str:
    """The sentence for a command that did not begin: its mark is missing.

    code: the exit code of ssh. stdout, stderr: what ssh and the login shell printed.
    """
    last_lines = [line.strip() for stream in (stdout, stderr) for line in stream.splitlines()[-1:] if line.strip()]
    output = last_lines[-1].rstrip(".") if last_lines else "nothing"
    if code == CONNECTION_FAILED or code is None or code < 0:
        return f"{host}: {output if last_lines else 'the connection broke'}."
    return (
        f"{host}: the login shell did not run our command, ended with {code}, and printed: {output}. If a startup file such as "
        "~/.bashrc or ~/.profile starts another program (exec) or ends the shell (exit), let it do this only on a terminal: "
        "[ -t 0 ] && exec ..."
    )


def _list_options(address: Address, ssh_settings: Mapping[str, str]) -> list[str]:
    """The options for the login on a machine. ssh_settings: OpenSSH's settings for this machine."""
    default_file = str(Path("~/.ssh/known_hosts").expanduser())
    user_files = _FILE_SEPARATOR.split(ssh_settings.get("userknownhostsfile", default_file))
    if any(file_name.endswith("/.ssh/known_hosts") for file_name in user_files):
        user_files.insert(0, default_file)  # another file than OpenSSH's if HOME is not the home folder of the account
    quoted_files = [_escape_path(address.known_hosts, quotes=True)] if address.known_hosts is not None else []
    # `none` must stand alone, but other files precede it; /dev/null is as empty.
    user_files = ["/dev/null" if file_name == "none" else file_name for file_name in user_files]
    quoted_files += [file_name.replace("\\", "\\\\").replace('"', '\\"') for file_name in user_files]
    known_hosts_text = " ".join(f'"{file_name}"' for file_name in dict.fromkeys(quoted_files))
    return [
        "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S:g}", "-o", "RemoteCommand=none",
        *_replace_session_settings(ssh_settings),
        "-o", f"UserKnownHostsFile={known_hosts_text}", "-o", "HashKnownHosts=no",
        "-o", f"StrictHostKeyChecking={'accept-new' if address.host_keys == 'accept-new' else 'yes'}",
    ]  # fmt: skip


def _replace_session_settings(ssh_settings: Mapping[str, str]) -> list[str]:
    """Options in place of settings of the user with which a command gets no input, goes to the background or does not start.
    OpenSSH before 8.7 refuses to start with such an option, but also has no such settings."""
    needed_values = {"StdinNull": "no", "ForkAfterAuthentication": "no", "SessionType": "default"}
    overrides = [f"{name}={value}" for name, value in needed_values.items() if ssh_settings.get(name.lower(), value) != value]
    return [word for setting in overrides for word in ("-o", setting)]


def _escape_path(path: Path, *, quotes: bool = False) -> str:
    """A path for an option of ssh. Every % is doubled, because ssh replaces %x. quotes: whether to escape " and backslashes."""
    escaped_path = str(path).replace("%", "%%")
    return escaped_path.replace("\\", "\\\\").replace('"', '\\"') if quotes else escaped_path
