"""The workspace on a cluster that belongs to a workspace on this machine, and how commands are executed on the cluster.

The runs of a cluster are stored in a second workspace on the shared storage of the cluster, where the nodes read and write
the files of the runs. If the nodes share no folder, the second workspace is on the controller. The commands that submit and
watch runs are executed on the controller, where Slurm's commands are installed. The workspace on this machine contains only
the cluster file, the matrices of the user, and .shardlab/away.json, which says where the workspace on the cluster is.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardlab import __version__
from shardlab.cluster.address import Address, HostKeys
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, json_file
from shardlab.files.decoders import DECODE_FAULTS, decoder
from shardlab.remote import rsync, shared_connection, terminal_relay
from shardlab.remote.remote import for_any_shell, ssh_command
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:  # reading cluster files needs PyYAML, whose import takes longer than the rest of this module
    from shardlab.cluster.cluster import Cluster

LIMIT_S = 120.0  # seconds in which a command on the cluster must answer
MOST_BYTES = 1 << 26  # largest answer of a command on the cluster: 64 MiB are enough for a hundred thousand runs
# A file in the workspace on the cluster that contains RemoteWorkspace.mark. If this machine can read the file under the same
# path, the folder on the cluster is also visible on this machine.
MARK = ".away"
MATRICES = "away-matrices.json"  # file in .shardlab: name of a matrix file sent to the cluster -> its path on this machine
NO_SHARED_FOLDER = (
    "the cluster {}: it has no folder that all nodes share, in which the jobs of Slurm find their runs. Set storage.shared in "
    "its file."
)
LOST = 255  # exit code of ssh if the connection fails

T = TypeVar("T")


class Received(msgspec.Struct):
    """What `python -m shardlab.remote.upload` prints on the cluster. version: the version of shardlab on the cluster."""

    version: str


class RemoteWorkspace(msgspec.Struct, frozen=True):
    """The content of .shardlab/away.json.

    host, port, user, identity, known_hosts, host_keys: how to log in to the cluster, as in shardlab.cluster.address.Address.
    workspace: the path of the workspace on the cluster.
    mark: host and path of the workspace on this machine to which the workspace on the cluster belongs.
    python: the interpreter on the cluster in which shardlab is installed.
    """

    schema: int
    cluster: str
    host: str
    port: int | None
    user: str | None
    identity: str | None
    known_hosts: str
    host_keys: HostKeys
    python: str
    workspace: str
    mark: str
    shared: bool = False  # whether all commands share one SSH connection (shardlab.remote.shared_connection)

    @property
    def address(self) -> Address:
        """How to log in to the machine on which commands use the workspace on the cluster."""
        identity = Path(self.identity) if self.identity else None
        return Address(self.host, self.port, self.user, identity, Path(self.known_hosts), self.host_keys, self.shared)

    def command(self, module: str, arguments: Sequence[str], *, terminal: bool = False) -> list[str]:
        """The ssh command, as a list of words, that runs a shardlab command on the cluster for the workspace there.

        module: the Python module of the shardlab command. arguments: its verb and options. terminal: whether the shardlab
        command draws on the terminal of this machine.
        """
        return [*ssh_command(self.address, terminal=terminal), f"exec {self.shell_command(module, arguments)}"]

    def shell_command(self, module: str, arguments: Sequence[str]) -> str:
        """The shardlab command for the workspace on the cluster, as text for a shell there. Arguments: as in `command`."""
        verb = arguments[:1]  # --workspace comes right after the verb: after an argument `--`, it would not be an option
        return shlex.join([self.python, "-P", "-m", module, *verb, "--workspace", self.workspace, *arguments[1:]])

    def ask(
        self,
        module: str,
        arguments: Sequence[str],
        shape: type[T],
        *,
        given: bytes = b"",
        limit_s: float = LIMIT_S,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a shardlab command with --json on the cluster, and return its JSON document, decoded as the type `shape`.

        module, arguments: as in `command`. given: standard input of the command. limit_s: time limit of the command in seconds.
        must_stop: returns True if the caller no longer waits for the answer; it is called several times a second.
        Raises ShardlabError with the error of the command, or if the document is not of the type `shape`.
        """
        self.log_in()
        # A line with the mark comes before the output of the command, because a .bashrc may print text before the command does.
        mark = secrets.token_hex(8)
        line = f"{mark}\n".encode()
        script = f"echo {mark}; echo {mark} >&2; exec {self.shell_command(module, [*arguments, '--json'])}"
        code, *streams = _answered([*ssh_command(self.address), for_any_shell(script)], given, limit_s, must_stop)
        is_too_large = len(streams[0]) >= MOST_BYTES
        document, errors = streams[0].partition(line)[2], streams[1].rpartition(line)[2]  # if the mark is missing, ssh failed
        if code is None and not is_too_large:
            raise ShardlabError(f"{self.host}: {module} did not answer within {limit_s:g} s.")
        if document and not is_too_large and (code is None or code == LOST or code < 0):
            raise ShardlabError(f"{self.host}: the connection broke in the middle of an answer; run the same command again.")
        if not document:
            said = "\n".join(errors.decode("utf-8", "replace").strip().splitlines())  # the lines of ssh end with \\r\\n
            raise ShardlabError(f"{self.host}: {said.removeprefix('error: ') or f'exit code {code}, and no answer'}")
        try:
            return decoder(shape).decode(document)
        except DECODE_FAULTS as error:
            why = f"more than {MOST_BYTES >> 20} MiB" if is_too_large else str(error)
            command = " ".join([module, *arguments[:1]])
            raise self.unlike_release(command, why) from None

    def unlike_release(self, command: str, why: str) -> ShardlabError:
        """The error for an answer that this release of shardlab cannot read. command: the command on the cluster, such as
        `collect fetch`. why: the reason, as a clause."""
        return ShardlabError(
            f"{self.host}: shardlab {__version__} cannot read the answer of `{command}` there ({why}). Another release "
            "may be installed there. To install this release there, run: provision CLUSTER.yaml"
        )

    def hand_over(self, module: str, arguments: Sequence[str]) -> int:
        """Run a shardlab command on the cluster with this terminal as its input and output; returns its exit code.

        module, arguments: as in `command`. Raises ShardlabError.
        """
        self.log_in()
        terminal = sys.stdout.isatty() and sys.stdin.isatty()
        code = terminal_relay.run(self.command(module, arguments, terminal=terminal), terminal=terminal)
        if code == LOST:
            raise ShardlabError(f"{self.host}: the connection broke or was refused; submitted runs continue.")
        return code

    def log_in(self) -> None:
        """Open the SSH connection that all commands share, if `shared` is true. The site may ask the user for a code.

        Raises NoLogin.
        """
        if self.shared:
            shared_connection.open_connection(ssh_command(self.address), self.host)


def _answered(
    argv: Sequence[str], given: bytes, limit_s: float, must_stop: Callable[[], bool]
) -> tuple[int | None, bytes, bytes]:
    """Run the ssh command `argv`. Returns (exit code, standard output, standard error), at most MOST_BYTES of each output.

    given, limit_s, must_stop: as in `RemoteWorkspace.ask`.
    The exit code is None if the command was ended because its output was too large, `must_stop` returned True, or the time
    limit was over. The output goes to files and not to pipes: an SSH connection that stays open for later commands would keep
    the pipes open.
    """

    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        ends = time.monotonic() + limit_s
        code: int | None = None
        with subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr) as process:
            try:
                while (code := rsync.exit_code(process)) is None:
                    is_large = any(os.fstat(stream.fileno()).st_size >= MOST_BYTES for stream in (stdout, stderr))
                    if is_large or must_stop() or time.monotonic() > ends:
                        break
            finally:
                if process.poll() is None:
                    process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return code, stdout.read(MOST_BYTES), stderr.read(MOST_BYTES)


def of(workspace: Workspace, cluster: Cluster) -> RemoteWorkspace:
    """The workspace on the cluster in which the runs of `workspace` are stored. Raises InputError.

    If away.json was written for `workspace`, the folder that away.json names is used again. The name of the folder is not
    computed again, because it depends on the path of `workspace`, and the user may have moved `workspace` since.
    """
    from shardlab.workspace import inventory

    if cluster.storage.shared is None and not cluster.has_separate_folders:
        raise InputError(NO_SHARED_FOLDER.format(cluster.name))
    address, python = inventory.controller(workspace, cluster)
    folder, mark = _folder(workspace, cluster)
    return RemoteWorkspace(
        schema=1,
        cluster=cluster.name,
        host=address.host,
        port=address.port,
        user=address.user,
        identity=str(address.identity) if address.identity else None,
        known_hosts=str(address.known_hosts),
        host_keys=address.host_keys,
        python=python,
        workspace=folder,
        mark=mark,
        shared=address.shared,
    )


def twin(workspace: Workspace, cluster: Cluster) -> Workspace:
    """The workspace on the cluster in which the runs of `workspace` are stored; its path is a path on the cluster.

    Raises InputError.
    """
    return Workspace(Path(_folder(workspace, cluster)[0]))


def _folder(workspace: Workspace, cluster: Cluster) -> tuple[str, str]:
    """Choose the folder of the workspace on the cluster. Returns (its path, its mark, which contains the host and the path of
    `workspace` on this machine)."""
    parent = cluster.workspaces
    mark = f"{gethostname()}:{workspace.real_path}\n"
    before = known(workspace)
    if before is not None and PurePosixPath(before.workspace).parent == parent and _is_ours(workspace, before):
        return before.workspace, before.mark
    return str(parent / _folder_name(workspace, mark)), mark


def _folder_name(workspace: Workspace, mark: str) -> str:
    short = hashlib.sha256(mark.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in workspace.real_path.name)
    return f"{name[:40]}-{short}"


def _is_ours(workspace: Workspace, recorded: RemoteWorkspace) -> bool:
    """Whether the away.json of a workspace was written for it. False: the workspace is a copy, made together with away.json.

    A workspace that was moved, or that another machine sees under another path, is not a copy and keeps its runs.
    recorded: the content of away.json.
    """
    path = Path(recorded.mark.partition(":")[2].removesuffix("\n"))
    if path.resolve() == workspace.real_path:
        return True
    there = json_file.read_if_valid(path / ".shardlab" / "away.json", RemoteWorkspace)
    return there is None or there.mark != recorded.mark  # None: no workspace is at the recorded path any more, it was moved


def known(workspace: Workspace) -> RemoteWorkspace | None:
    """The content of away.json in this workspace; None if there is no such file, because the runs are stored here.

    Raises InputError if the file cannot be decoded, and WorkspaceError if it cannot be read.
    """
    fault = "is not of this version: {}; remove this file and submit again."
    return json_file.read(workspace.own / "away.json", RemoteWorkspace, fault)


def of_this_workspace(workspace: Workspace) -> RemoteWorkspace | None:
    """The same as `known`, for a command that changes runs. Also raises InputError if this workspace is a copy of another
    workspace, because the runs on the cluster then belong to the other workspace.
    """
    away = known(workspace)
    if away is not None and not _is_ours(workspace, away):
        original = away.mark.partition(":")[2].removesuffix("\n")
        raise InputError(
            f"{workspace.path}: is a copy of {original}, and this command would change the runs of the original on "
            f"{away.cluster}. For those runs, use --workspace {shlex.quote(original)}; for own runs here, use `jobs submit`."
        )
    return away


def keep(workspace: Workspace, away: RemoteWorkspace) -> None:
    """Write away.json in this workspace, which says where its runs are stored on the cluster. Raises WorkspaceError."""
    files.make_folder(workspace.own)
    files.write_json(workspace.own / "away.json", away)
    workspace_trust.keep(workspace, workspace.own / "away.json")


def keep_matrix(workspace: Workspace, file: Path) -> None:
    """Record the path of a matrix file on this machine, because the cluster knows only the name of the file.

    Raises WorkspaceError.
    """
    files.make_folder(workspace.own)
    files.write_json(workspace.own / MATRICES, {**_matrices(workspace), file.name: str(file.absolute())})


def path_here(workspace: Workspace, path: str) -> str:
    """The path of a matrix file on this machine. path: the path of its copy on the cluster.

    If the path on this machine was not recorded by `keep_matrix`, `path` is returned.
    """
    there = known(workspace)
    delivered = there is not None and str(PurePosixPath(path).parent) == f"{there.workspace}/matrices"
    return _matrices(workspace).get(PurePosixPath(path).name, path) if delivered else path


def _matrices(workspace: Workspace) -> dict[str, str]:
    return json_file.read_if_valid(workspace.own / MATRICES, dict[str, str]) or {}


def deliver(away: RemoteWorkspace, texts: Mapping[str, bytes]) -> None:
    """Upload files into the workspace on the cluster. texts: for each path relative to that workspace, the content of the file.

    Raises ShardlabError.
    """
    document = {path: text.decode("utf-8", "surrogateescape") for path, text in texts.items()} | {MARK: away.mark}
    away.ask("shardlab.remote.upload", [], Received, given=json.dumps(document).encode())
