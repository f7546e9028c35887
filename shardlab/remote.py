"""Runs commands on other machines over SSH, safely. No other file imports fabric.

fabric itself trusts every host key, a changed one too (its Connection sets AutoAddPolicy and loads no known hosts). Here
the keys of `~/.ssh/known_hosts` and of the workspace are loaded. A login to a machine with an unknown key is refused, with the
fingerprint, unless the cluster file says `host_keys: accept-new`; a login to a machine whose key changed is always refused.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardlab import files, proxy_jump, shared_connection
from shardlab.errors import ShardlabError
from shardlab.proxy_jump import Jump

CONNECT_S = 10.0
KEEPALIVE_S = 15
GRACE_S = 5.0  # from SIGTERM to SIGKILL for a command there; waited twice more before this side gives up
CHUNK = 1 << 16
SESSION = f"SHARDLAB_SESSION={secrets.token_hex(8)}"  # in the environment of all commands that we start elsewhere
HostKeys = Literal["strict", "accept-new"]

# Written beside the file under a name of its own, checked, and renamed: a reader sees the old file or the new one.
PUT = """\
set -eu
if test -z "$4"; then mkdir -p -- "$(dirname -- "$1")"; fi
umask 077
new=$1.$3
trap 'rm -f -- "$new"' EXIT
trap 'exit 1' HUP INT TERM
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
    """The output of a command. `code` is its exit status (negative: minus the signal), or None if it exceeded its limit."""

    code: int | None
    stdout: str
    stderr: str


class Unreachable(ShardlabError):
    """The login to a machine failed, and why. node: its name in the cluster file, if known."""

    node: str | None = None

    @property
    def blames(self) -> dict[str, str]:
        """The node at fault and why, if its name is known."""
        return {self.node: str(self)} if self.node is not None else {}


class Address(msgspec.Struct, frozen=True):
    """How to log in to a machine. host: an address or a name from `~/.ssh/config`, which also applies to what is None."""

    host: str
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    known_hosts: Path | None = None  # of the workspace, besides the user's own
    host_keys: HostKeys = "strict"
    shared: bool = False  # whether all our commands use one connection (shared_connection), as for a site's login node


class Remote:
    """One machine, logged in to at the first command and kept open; commands of several threads share it."""

    def __init__(self, address: Address, *, may_sudo: bool = True) -> None:
        """may_sudo: whether root's commands may be ended by sudo."""
        self.address = address
        self._may_sudo = may_sudo
        self._lock = threading.Lock()
        self._connection: Any = None
        self._running: dict[str, str] = {}  # the beginning of each command that runs, by its mark
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
        """Run `argv` there; no shell interprets its words. It is ended there after `timeout_s` seconds.

        env and argv can be read by everyone on that machine: a secret goes through `stdin`. Raises Unreachable.
        """
        words = [
            "env",
            "LC_ALL=C",
            "PYTHONSAFEPATH=1",
            SESSION,
            *(f"{name}={value}" for name, value in (env or {}).items()),
            *argv,
        ]
        # `timeout` ends its command even if this side is gone. sudo comes first, or `timeout` could not end root's process.
        words = [*(["sudo", "-n", "--"] if root else []), "timeout", f"--kill-after={GRACE_S:g}", f"{timeout_s:g}", *words]
        mark = secrets.token_hex(8)  # a .bashrc may print before the command does
        # The session ends only after it has read the end of its input: a server disconnects a client that says this end of a
        # session that is over, and all other commands would break with it. The exit status of a signal is 128 + signal.
        script = f"echo {mark}; echo {mark} >&2; {shlex.join(words)}; code=$?; cat > /dev/null; exit $code"
        begin = time.monotonic()
        try:
            transport = self._transport()
            self._running[mark] = in_short(argv)
            if self._ended:  # looked at after the command is listed: `end` sees it, or it does not begin
                raise Unreachable(f"{self.address.host}: this program was interrupted.")
            channel = transport.open_session(timeout=CONNECT_S)
            channel.exec_command(f"exec sh -c {shlex.quote(script)}")
            answer = _converse(channel, stdin, timeout_s + 3 * GRACE_S)
        except Unreachable:
            raise
        except Exception as error:
            self.close()
            raise Unreachable(f"{self.address.host}: the connection broke: {_said(error)}.") from error
        finally:
            self._running.pop(mark, None)
        ended = answer.code in (124, 137) and time.monotonic() - begin >= timeout_s  # what `timeout` ends with when it had to
        code = None if ended else answer.code
        return CommandOutput(code, _after(mark, answer.stdout), _after(mark, answer.stderr))

    def put(self, content: bytes, path: str, *, mode: int, owner: str, timeout_s: float = 60) -> CommandOutput:
        """Write the file `path`, completely or not at all; the content is sent as standard input. owner: as for chown, by root;
        empty: the user who logs in, who then writes the file."""
        argv = putting(content, path, mode=mode, owner=owner)
        return self.run(argv, timeout_s=timeout_s, stdin=content, root=bool(owner))

    @property
    def running(self) -> tuple[str, ...]:
        """The beginning of each command that `run` has begun and that has not ended, as far as this side knows."""
        return tuple(self._running.values())

    def end(self, limit_s: float) -> None:
        """Send SIGTERM to all that `run` started there, and wait until it has ended, for `limit_s` seconds at most.

        No other command begins from now on. What ignores SIGTERM is killed there GRACE_S seconds later.
        """
        self._ended = True
        ends = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # a connection that broke: what is left in `running` says it
            transport = self._connection.transport  # without the lock, which is held while somebody logs in
            pattern = f"[{SESSION[0]}]{SESSION[1:]}"  # which does not match its own command line
            kill = shlex.quote(f"pkill -TERM -f {shlex.quote(pattern)}")
            channel = transport.open_session(timeout=limit_s)
            channel.settimeout(limit_s)
            channel.exec_command(f"sudo -n sh -c {kill} || sh -c {kill}" if self._may_sudo else f"sh -c {kill}")
        while self._running and time.monotonic() < ends:
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
                self._connection = _open(self.address)
                transport = self._connection.transport
                transport.set_keepalive(KEEPALIVE_S)
            return transport


def ssh_command(address: Address, *, terminal: bool = False) -> list[str]:
    """The words of OpenSSH's own client for a machine, to be followed by the command as one word, which a shell there reads.

    It is for commands that run for long or need a terminal. It never asks for input. Host keys, also those of proxy jumps, are
    checked with the same files and rules as in `Remote`.
    """
    known = [address.known_hosts] if address.known_hosts is not None else []
    files_ = " ".join(f'"{_literal(path, quotes=True)}"' for path in [*known, Path("~/.ssh/known_hosts").expanduser()])
    rules = [
        "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S:g}", "-o", f"UserKnownHostsFile={files_}",
        "-o", f"StrictHostKeyChecking={'accept-new' if address.host_keys == 'accept-new' else 'yes'}",
    ]  # fmt: skip
    words = ["ssh", "-q" if terminal else "-T", *rules, "-o", f"ServerAliveInterval={KEEPALIVE_S}"]
    words += ["-t"] if terminal else []
    words += ["-i", _literal(address.identity)] if address.identity is not None else []
    to = Jump(address.host, address.user, address.port)
    if address.shared:  # OpenSSH finds its way by itself, and may ask for a code on the way
        return [*words, *shared_connection.options(), *to.words]
    way = proxy_jump.way(to)
    return [*words, *(proxy_jump.option(way.jumps, rules) if way is not None else []), *to.words]


def rsync_words(address: Address) -> tuple[str, str]:
    """(the machine as rsync names it, rsync's option for the login to the machine)."""
    *ssh, host = ssh_command(address)
    return f"[{host}]" if ":" in host else host, f"--rsh={shlex.join([word for word in ssh if word != '--'])}"


def _literal(path: Path, *, quotes: bool = False) -> str:
    """A path in an option of ssh, with every % doubled: ssh replaces % and a letter by other text."""
    text = str(path).replace("%", "%%")
    return text.replace("\\", "\\\\").replace('"', '\\"') if quotes else text


def putting(content: bytes, path: str, *, mode: int, owner: str) -> list[str]:
    """The command that writes its standard input to `path`, if the input is `content`."""
    return ["sh", "-c", PUT, "put", path, hashlib.sha256(content).hexdigest(), secrets.token_hex(4), owner, f"{mode:o}"]


def for_any_shell(script: str) -> str:
    """A command that executes a script of sh. The user's own shell reads it: csh allows no newline and no `!` in quotes."""
    return f"exec sh -c 'eval \"$(echo {base64.b64encode(script.encode()).decode()} | base64 -d)\"'"


def in_short(argv: Sequence[str]) -> str:
    """The beginning of a command, on one line, for a person."""
    return " ".join(shlex.join(argv).split())[:60]


def fingerprint(key: bytes) -> str:
    """The SHA-256 fingerprint of a public key as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _converse(channel: Any, stdin: bytes, silence_s: float) -> CommandOutput:
    """Send and receive until the command ends; code None if the machine sends nothing for `silence_s` seconds.

    Raises OSError if the connection ends before the command does.
    """
    channel.settimeout(silence_s)
    with ThreadPoolExecutor(3) as pool:
        sent = pool.submit(_send, channel, stdin)
        streams = [pool.submit(_receive, read) for read in (channel.recv, channel.recv_stderr)]
        stdout, stderr = (stream.result() for stream in streams)
        ended = channel.status_event.wait(0 if None in (stdout, stderr) else silence_s)
        code = channel.recv_exit_status() if ended else None
        channel.close()
        sent.result()
    if code == -1:
        raise OSError("it was closed before the command ended")
    return CommandOutput(code, *((stream or b"").decode("utf-8", "replace") for stream in (stdout, stderr)))


def _send(channel: Any, stdin: bytes) -> None:
    with contextlib.suppress(OSError):  # the command ended before it read all input; its exit status says why
        channel.sendall(stdin)
        channel.shutdown_write()


def _receive(read: Callable[[int], bytes]) -> bytes | None:
    """All of a stream, or None if nothing came for too long."""
    parts = []
    try:
        while part := read(CHUNK):
            parts.append(part)
    except TimeoutError:
        return None
    return b"".join(parts)


def _after(mark: str, text: str) -> str:
    """The text after the line of the mark; '' if the text has no such line."""
    return text.partition(mark + "\n")[2]


def _open(address: Address) -> Any:
    """A logged-in fabric Connection. Raises Unreachable."""
    import paramiko

    host, port = address.host, address.port
    connections = _connections(address)
    try:
        for connection in connections:
            is_target = connection is connections[-1]
            host, port = (address if is_target else connection).host, connection.port
            connection.client.load_system_host_keys()
            if address.known_hosts is not None and address.known_hosts.exists():
                connection.client.load_host_keys(str(address.known_hosts))
            connection.client.set_missing_host_key_policy(_policy(address))
            connection.open()
    except Unreachable:
        raise
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise Unreachable(f"{host}: {_why_not_open(error, host, port, address)}") from None
    return connections[-1]


def _connections(address: Address) -> list[Any]:
    """fabric's connections to the proxy jumps in their order, and then to the machine. None of them is open."""
    import fabric

    def connection(to: Jump, gateway: Any, keys: dict[str, Any]) -> Any:
        timeout_s = int(CONNECT_S)
        return fabric.Connection(to.host, to.user, to.port, gateway=gateway, connect_timeout=timeout_s, connect_kwargs=keys)

    keys: dict[str, Any] = {"banner_timeout": CONNECT_S, "auth_timeout": CONNECT_S}
    if address.identity is not None:
        keys["key_filename"] = str(address.identity)
    target = Jump(address.host, address.user, address.port)
    way = proxy_jump.way(target)
    # If the gateway is None, fabric reads ~/.ssh/config itself; '' means no gateway.
    gateway: Any = way.command if way is not None else None
    jumps = []
    for jump in way.jumps if way is not None else ():
        gateway = connection(jump, gateway, {})
        jumps.append(gateway)
    return [*jumps, connection(target, gateway, keys)]


def _policy(address: Address) -> Any:
    """paramiko's policy for a machine whose host key is not known: refuse it, or remember the key if the address allows it."""
    import paramiko

    def missing(_client: Any, hostname: str, key: Any) -> None:
        if address.host_keys == "strict" or address.known_hosts is None:
            raise Unreachable(
                f"{hostname}: its host key is not known: {key.get_name()} {fingerprint(key.asbytes())}. Compare it with the "
                "one that the machine's console or provider shows, then log in once with ssh, or write host_keys: accept-new "
                "under ssh in the cluster file."
            )
        _remember(address.known_hosts, hostname, key)

    return type("Policy", (paramiko.MissingHostKeyPolicy,), {"missing_host_key": staticmethod(missing)})()


def _why_not_open(error: Exception, host: str, port: int | None, address: Address) -> str:
    """Why a login failed, as the rest of a sentence that begins with the name of the machine."""
    import paramiko

    if isinstance(error, paramiko.BadHostKeyException):
        file = ["-f", str(address.known_hosts)] if address.known_hosts else []
        forget = shlex.join(["ssh-keygen", "-R", host if port == 22 else f"[{host}]:{port}", *file])
        return (
            f"its host key CHANGED: known is {fingerprint(error.expected_key.asbytes())}, found is "
            f"{fingerprint(error.key.asbytes())}. If the machine was reinstalled, remove the old key: {forget}. "
            "Otherwise the connection may be intercepted."
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return "the key needs a passphrase; add it to an agent: ssh-add."
    if isinstance(error, paramiko.AuthenticationException):
        if "saw EOF" in str(error):  # a machine that is still starting closes the connection, and says nothing about keys
            return "it closed the connection during the login: it may be starting, or have too many logins."
        return f"it accepts no SSH key of this user: {_said(error)}."
    if str(error) == "No authentication methods available":
        return (
            "found no SSH key: no SSH agent has a key, and ~/.ssh has no key with a default name. Add a key to an agent "
            "(ssh-add), or set ssh.identity in the cluster file to the path of a key."
        )
    return f"cannot be reached: {_said(error)}."


_REMEMBERING = threading.Lock()


def _remember(known_hosts: Path, hostname: str, key: Any) -> None:
    with _REMEMBERING:
        old = known_hosts.read_bytes() if known_hosts.exists() else b""
        files.make_folder(known_hosts.parent)
        files.write_atomic(known_hosts, old + f"{hostname} {key.get_name()} {key.get_base64()}\n".encode())


def _said(error: BaseException) -> str:
    """The reason in words: without the number of an OSError, which paramiko leaves out and Python then writes as None."""
    several = getattr(error, "errors", None)  # of paramiko, by address: why each could not be connected to
    if isinstance(error, OSError) and isinstance(several, dict) and several:
        reasons = dict.fromkeys(f"{_said(why)} (port {place[1]})" for place, why in several.items())
        return ", ".join(reasons)
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.strip().rstrip(".") or type(error).__name__
