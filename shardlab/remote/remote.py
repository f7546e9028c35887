"""Runs commands on other machines over SSH, and checks host keys. No other file imports fabric.

fabric alone would trust every host key, even a changed key, because its Connection sets AutoAddPolicy and loads no known hosts.
This module loads the keys in `~/.ssh/known_hosts` and the keys of the workspace. If the key of a machine is unknown, the login
is refused with the fingerprint, unless the cluster file has `host_keys: accept-new`. If the key has changed, the login is
always refused.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardlab.cluster.address import Address
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.remote import proxy_jump, shared_connection
from shardlab.remote.proxy_jump import JumpHost

CONNECT_S = 10.0  # time limit of a connection and of a login
KEEPALIVE_S = 15  # seconds between two keepalive messages
GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL for a remote command; this process waits 2 * GRACE_S longer for the answer
CHUNK_BYTES = 1 << 16  # bytes that are received at a time
# An environment variable of every remote command that this process starts. `Remote.end` finds the commands by this variable.
SESSION = f"SHARDLAB_SESSION={secrets.token_hex(8)}"

# Writes standard input to a temporary file beside $1, checks its SHA-256 ($2) and renames it to $1, so that a reader sees the
# whole old file or the whole new file. $3: suffix of the temporary file. $4: owner or empty. $5: mode.
PUT_SCRIPT = """\
set -eu
if test -z "$4"; then mkdir -p -- "$(dirname -- "$1")"; fi
umask 077
new=$1.$3
trap 'rm -f -- "$new"' EXIT; trap 'exit 1' HUP INT TERM
set -C
: > "$new"
set +C
cat > "$new"
test "$(sha256sum < "$new" | cut -d ' ' -f 1)" = "$2"
if test -n "$4"; then chown -- "$4" "$new"; fi
chmod -- "$5" "$new"
sync -- "$new"
mv -fT -- "$new" "$1"
"""


class CommandOutput(msgspec.Struct, frozen=True):
    """The output of a command."""

    code: int | None
    """Its exit code; None after the time limit; -N if signal N ended it on this machine."""
    stdout: str
    stderr: str


class Unreachable(ShardlabError):
    """Raised if a login failed or a connection broke."""

    node: str | None = None
    """The name of the machine in the cluster file, if it is known."""

    @property
    def reasons_by_node(self) -> dict[str, str]:
        """The name of the node and the message; empty if the name of the node is not known."""
        return {self.node: str(self)} if self.node is not None else {}


class Remote:
    """A machine that is reached over SSH. The first command logs in; later commands of all threads use the same connection."""

    def __init__(self, address: Address, *, may_sudo: bool = True) -> None:
        """may_sudo: whether the method `end` may use sudo, without which it cannot end commands of root."""
        self.address = address
        self._may_sudo = may_sudo
        self._lock = threading.Lock()
        self._connection: Any = None
        self._running: dict[str, str] = {}  # the beginning of each running command, by the mark of the command
        self._ended = False

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        root: bool = False,
    ) -> CommandOutput:
        """Run the command `argv` on the machine. Its words are passed on unchanged: no shell interprets them.

        timeout_s: seconds after which the command is ended on the machine. env: further environment variables. stdin: the
        standard input of the command. root: whether to run the command with sudo. All users of the machine can read argv and
        env, so a secret must be passed by `stdin`. Raises Unreachable.
        """
        words = [
            "env",
            "LC_ALL=C",
            "PYTHONSAFEPATH=1",
            SESSION,
            *(f"{name}={value}" for name, value in (env or {}).items()),
            *argv,
        ]
        # `timeout` on the machine ends the command even if this process has ended. sudo comes before `timeout`: otherwise
        # `timeout` could not end a process of root.
        words = [*(["sudo", "-n", "--"] if root else []), "timeout", f"--kill-after={GRACE_S:g}", f"{timeout_s:g}", *words]
        mark = secrets.token_hex(8)  # printed on a line before the output of the command, because a .bashrc may print text too
        # `cat` reads the rest of the input, so that the session ends only after the end of its input. If the end of the input
        # came when the session is over, the server would close the connection, and all other commands would fail.
        # If a signal ended the command, $? is 128 + the number of the signal.
        script = f"echo {mark}; echo {mark} >&2; {shlex.join(words)}; code=$?; cat > /dev/null; exit $code"
        start_s = time.monotonic()
        try:
            transport = self._transport()
            self._running[mark] = shorten_command(argv)
            if self._ended:  # checked after the command is in _running, so that `end` sees each command that starts
                raise Unreachable(f"{self.address.host}: this program was interrupted.")
            channel = transport.open_session(timeout=CONNECT_S)
            channel.exec_command(f"exec sh -c {shlex.quote(script)}")
            answer = _exchange_streams(channel, stdin, timeout_s + 3 * GRACE_S)
        except Unreachable:
            raise
        except Exception as error:
            self.close()
            raise Unreachable(f"{self.address.host}: the connection broke: {_error_reason(error)}.") from error
        finally:
            self._running.pop(mark, None)
        timed_out = (
            answer.code in (124, 137) and time.monotonic() - start_s >= timeout_s
        )  # exit codes of `timeout` at the time limit
        code = None if timed_out else answer.code
        return CommandOutput(code, _text_after_mark(mark, answer.stdout), _text_after_mark(mark, answer.stderr))

    def put(self, content: bytes, path: str, *, mode: int, owner: str, timeout_s: float = 60) -> CommandOutput:
        """Write the file `path` on the machine, completely or not at all. The content is sent as standard input.

        mode: the permissions of the file. owner: user and group as for chown, set by root; empty: the user who logs in writes
        the file without root. Raises Unreachable.
        """
        argv = put_command(content, path, mode=mode, owner=owner)
        return self.run(argv, timeout_s=timeout_s, stdin=content, root=bool(owner))

    @property
    def running(self) -> tuple[str, ...]:
        """The beginning of each command that `run` has started and whose end this process has not seen yet."""
        return tuple(self._running.values())

    def end(self, limit_s: float) -> None:
        """Send SIGTERM to all commands that `run` started on the machine, and wait at most `limit_s` seconds until they end.

        From now on, `run` starts no command. A command that ignores SIGTERM is killed GRACE_S seconds later.
        """
        self._ended = True
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # if the connection broke, the commands stay in `running`
            transport = self._connection.transport  # not locked: another thread holds the lock during a login
            pattern = f"[{SESSION[0]}]{SESSION[1:]}"  # does not match the command line of pkill itself
            kill = shlex.quote(f"pkill -TERM -f {shlex.quote(pattern)}")
            channel = transport.open_session(timeout=limit_s)
            channel.settimeout(limit_s)
            channel.exec_command(f"sudo -n sh -c {kill} || sh -c {kill}" if self._may_sudo else f"sh -c {kill}")
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """Log out; the next command logs in again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _transport(self) -> Any:
        with self._lock:
            transport = self._connection.transport if self._connection is not None else None
            if transport is None or not transport.is_active():
                self._connection = _log_in(self.address)
                transport = self._connection.transport
                transport.set_keepalive(KEEPALIVE_S)
            return transport


def ssh_command(address: Address, *, terminal: bool = False) -> list[str]:
    """An `ssh` command, as a list of words, that logs in to a machine. The caller adds one word: what the shell there executes.

    It is used for remote commands that run for a long time or need a terminal (`terminal`). It never asks for input. The host
    keys of the machine and of proxy jumps are checked with the same files and rules as in `Remote`.
    """
    workspace_files = [address.known_hosts] if address.known_hosts is not None else []
    known_hosts_files = " ".join(
        f'"{_escape_path(path, quotes=True)}"' for path in [*workspace_files, Path("~/.ssh/known_hosts").expanduser()]
    )
    rules = [
        "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S:g}", "-o", f"UserKnownHostsFile={known_hosts_files}",
        "-o", f"StrictHostKeyChecking={'accept-new' if address.host_keys == 'accept-new' else 'yes'}",
    ]  # fmt: skip
    words = ["ssh", "-q" if terminal else "-T", *rules, "-o", f"ServerAliveInterval={KEEPALIVE_S}"]
    words += ["-t"] if terminal else []
    words += ["-i", _escape_path(address.identity)] if address.identity is not None else []
    target = JumpHost(address.host, address.user, address.port)
    if address.shared:  # OpenSSH itself follows the proxy jumps, because a jump may ask for a code
        return [*words, *shared_connection.connection_options(), *target.words]
    route = proxy_jump.find_route(target)
    return [*words, *(proxy_jump.proxy_option(route.jumps, rules) if route is not None else []), *target.words]


def _escape_path(path: Path, *, quotes: bool = False) -> str:
    """A path for an option of ssh. Every % is doubled, because ssh replaces %x. quotes: whether to escape " and backslashes."""
    text = str(path).replace("%", "%%")
    return text.replace("\\", "\\\\").replace('"', '\\"') if quotes else text


def put_command(content: bytes, path: str, *, mode: int, owner: str) -> list[str]:
    """The words of a command that writes its standard input to `path`. It fails if the standard input is not `content`."""
    return ["sh", "-c", PUT_SCRIPT, "put", path, hashlib.sha256(content).hexdigest(), secrets.token_hex(4), owner, f"{mode:o}"]


def wrap_for_any_shell(script: str) -> str:
    """A command that runs a sh script in any login shell: in base64, because csh allows no newline or `!` in quotes."""
    return f"exec sh -c 'eval \"$(echo {base64.b64encode(script.encode()).decode()} | base64 -d)\"'"


def shorten_command(argv: Sequence[str]) -> str:
    """The first 60 characters of a command, on one line, for messages."""
    return " ".join(shlex.join(argv).split())[:60]


def key_fingerprint(key: bytes) -> str:
    """The SHA-256 fingerprint of a public key, in the format of ssh-keygen -l."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _exchange_streams(channel: Any, stdin: bytes, silence_s: float) -> CommandOutput:
    """Send the input of a remote command and receive its output until the command ends.

    channel: paramiko's channel on which the command was started. The exit code in the result is None if the machine sends
    nothing for `silence_s` seconds. Raises OSError if the connection ends before the command ends.
    """
    from concurrent.futures import ThreadPoolExecutor

    channel.settimeout(silence_s)
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(_send_input, channel, stdin)
        streams = [pool.submit(_receive_output, read) for read in (channel.recv, channel.recv_stderr)]
        stdout, stderr = (stream.result() for stream in streams)
        has_ended = channel.status_event.wait(0 if None in (stdout, stderr) else silence_s)
        code = channel.recv_exit_status() if has_ended else None
        channel.close()
        sending.result()
    if code == -1:
        raise OSError("it was closed before the command ended")
    return CommandOutput(code, *((stream or b"").decode("utf-8", "replace") for stream in (stdout, stderr)))


def _send_input(channel: Any, stdin: bytes) -> None:
    with contextlib.suppress(OSError):  # the command ended before it read all input; its exit status says why
        channel.sendall(stdin)
        channel.shutdown_write()


def _receive_output(read: Callable[[int], bytes]) -> bytes | None:
    """Receive the whole output of a command on one stream; None if nothing arrives for the timeout of the channel."""
    parts = []
    try:
        while part := read(CHUNK_BYTES):
            parts.append(part)
    except TimeoutError:
        return None
    return b"".join(parts)


def _text_after_mark(mark: str, text: str) -> str:
    """The text after the line that ends with the mark; empty if there is no such line."""
    return text.partition(mark + "\n")[2]


def _log_in(address: Address) -> Any:
    """Log in and return the Connection of fabric. Raises Unreachable."""
    import paramiko

    host, port = address.host, address.port
    connections = _make_connections(address)
    try:
        for connection in connections:
            is_target = connection is connections[-1]
            host, port = (address if is_target else connection).host, connection.port
            connection.client.load_system_host_keys()
            if address.known_hosts is not None and address.known_hosts.exists():
                connection.client.load_host_keys(str(address.known_hosts))
            connection.client.set_missing_host_key_policy(_host_key_policy(address))
            connection.open()
    except Unreachable:
        raise
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise Unreachable(f"{host}: {_login_error_reason(error, host, port, address)}") from None
    return connections[-1]


def _make_connections(address: Address) -> list[Any]:
    """fabric's connections to the proxy jumps, in order, and at the end to the machine itself. No connection is open yet."""
    import fabric

    def connection(machine: JumpHost, gateway: Any, connect_options: dict[str, Any]) -> Any:
        timeout_s = int(CONNECT_S)
        return fabric.Connection(
            machine.host, machine.user, machine.port, gateway=gateway, connect_timeout=timeout_s, connect_kwargs=connect_options
        )

    connect_options: dict[str, Any] = {"banner_timeout": CONNECT_S, "auth_timeout": CONNECT_S}
    if address.identity is not None:
        connect_options["key_filename"] = str(address.identity)
    target = JumpHost(address.host, address.user, address.port)
    route = proxy_jump.find_route(target)
    # If the gateway is None, fabric looks for a gateway in ~/.ssh/config; if it is '', fabric uses no gateway.
    gateway: Any = route.command if route is not None else None
    jump_connections = []
    for jump in route.jumps if route is not None else ():
        gateway = connection(jump, gateway, {})
        jump_connections.append(gateway)
    return [*jump_connections, connection(target, gateway, connect_options)]


def _host_key_policy(address: Address) -> Any:
    """The policy of paramiko for unknown host keys: refuse the login, or store the key if the address allows accept-new."""
    import paramiko

    def missing(_client: Any, hostname: str, key: Any) -> None:
        if address.host_keys == "strict" or address.known_hosts is None:
            raise Unreachable(
                f"{hostname}: its host key is not known: {key.get_name()} {key_fingerprint(key.asbytes())}. Compare it with "
                "one that the machine's console or provider shows, then log in once with ssh, or write host_keys: accept-new "
                "under ssh in the cluster file."
            )
        _store_host_key(address.known_hosts, hostname, key)

    return type("Policy", (paramiko.MissingHostKeyPolicy,), {"missing_host_key": staticmethod(missing)})()


def _login_error_reason(error: Exception, host: str, port: int | None, address: Address) -> str:
    """Why a login failed. The text is the second part of a sentence that begins with the name of the machine."""
    import paramiko

    if isinstance(error, paramiko.BadHostKeyException):
        file_option = ["-f", str(address.known_hosts)] if address.known_hosts else []
        forget_command = shlex.join(["ssh-keygen", "-R", host if port == 22 else f"[{host}]:{port}", *file_option])
        return (
            f"its host key CHANGED: known is {key_fingerprint(error.expected_key.asbytes())}, found is "
            f"{key_fingerprint(error.key.asbytes())}. If the machine was reinstalled, remove the old key: {forget_command}. "
            "Otherwise the connection may be intercepted."
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return "the key needs a passphrase; add it to an agent: ssh-add."
    if isinstance(error, paramiko.AuthenticationException):
        if "saw EOF" in str(error):  # the machine closed the connection without an answer about keys: it may be booting
            return "it closed the connection during the login: it may be starting, or have too many logins."
        return f"it accepts no SSH key of this user: {_error_reason(error)}."
    if str(error) == "No authentication methods available":
        return (
            "found no SSH key: no SSH agent has a key, and ~/.ssh has no key with a default name. Add a key to an agent "
            "(ssh-add), or set ssh.identity in the cluster file to the path of a key."
        )
    return f"cannot be reached: {_error_reason(error)}."


_HOST_KEYS_LOCK = threading.Lock()


def _store_host_key(known_hosts: Path, hostname: str, key: Any) -> None:
    with _HOST_KEYS_LOCK:
        old_content = files.read(known_hosts, follow=True) if known_hosts.exists() else b""
        files.make_folder(known_hosts.parent)
        files.write_atomic(known_hosts, old_content + f"{hostname} {key.get_name()} {key.get_base64()}\n".encode())


def _error_reason(error: BaseException) -> str:
    """The reason of an error in words, without the number of an OSError, which is None in errors of paramiko."""
    errors_by_address = getattr(error, "errors", None)  # paramiko's NoValidConnectionsError contains an error for each address
    if isinstance(error, OSError) and isinstance(errors_by_address, dict) and errors_by_address:
        reasons = dict.fromkeys(f"{_error_reason(cause)} (port {address[1]})" for address, cause in errors_by_address.items())
        return ", ".join(reasons)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.strip().rstrip(".") or type(error).__name__
