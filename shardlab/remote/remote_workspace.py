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
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.remote import shared_connection, terminal_relay
from shardlab.remote.ssh_command import CONNECTION_FAILED, describe_lost_command, make_ssh_command, wrap_for_any_shell
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:  # reading cluster files needs PyYAML, whose import takes longer than the rest of this module
    from shardlab.cluster.cluster import Cluster
    from shardlab.workspace.inventory import InventoryNode

LIMIT_S = 120.0  # seconds in which a command on the cluster must answer
POLL_S = 0.1  # seconds between two checks whether a command has ended, or must end
MOST_BYTES = 1 << 26  # largest answer of a command on the cluster: 64 MiB are enough for a hundred thousand runs
# A file in the workspace on the cluster that contains RemoteWorkspace.mark. If this machine can read the file under the same
# path, the folder on the cluster is also visible on this machine.
MARK_FILE = ".away"
# File in .shardlab: name of a matrix file sent to the cluster -> its path on this machine
MATRIX_PATHS_FILE = "away-matrices.json"
NO_SHARED_FOLDER = (
    "the cluster {}: it has no folder that all nodes share, in which the jobs of Slurm find their runs. Set storage.shared in "
    "its file."
)

T = TypeVar("T")


class UploadResult(msgspec.Struct):
    """What `python -m shardlab.remote.upload` prints on the cluster."""

    version: str
    """The version of shardlab on the cluster."""


class RemoteWorkspace(msgspec.Struct, frozen=True):
    """The content of .shardlab/away.json."""

    schema: int
    cluster: str
    host: str
    """How to log in to the cluster, as in shardlab.cluster.address.Address."""
    port: int | None
    """As in Address."""
    user: str | None
    """As in Address."""
    identity: str | None
    """As in Address."""
    known_hosts: str
    """As in Address."""
    host_keys: HostKeys
    """As in Address."""
    python: str
    """The interpreter on the cluster in which shardlab is installed."""
    workspace: str
    """The path of the workspace on the cluster."""
    mark: str
    """Host and path of the workspace on this machine to which the workspace on the cluster belongs."""
    shared: bool = False
    """Whether all commands share one SSH connection (shardlab.remote.shared_connection)."""

    @property
    def address(self) -> Address:
        """How to log in to the machine on which commands use the workspace on the cluster."""
        identity_path = Path(self.identity) if self.identity else None
        return Address(self.host, self.port, self.user, identity_path, Path(self.known_hosts), self.host_keys, self.shared)

    def make_ssh_command(
        self, module: str, arguments: Sequence[str], start_mark: str, *, terminal: bool = False, marks_errors: bool = True
    ) -> list[str]:
        """The ssh command, as a list of words, that runs a shardlab command on the cluster for the workspace there.

        module: the Python module of the shardlab command. arguments: its verb and options. start_mark, marks_errors: as for
        `wrap_for_any_shell`. terminal: whether the shardlab command draws on the terminal of this machine."""
        verb_words = arguments[:1]  # --workspace comes right after the verb: after an argument `--`, it would not be an option
        command_words = [self.python, "-P", "-m", module, *verb_words, "--workspace", self.workspace, *arguments[1:]]
        return [
            *make_ssh_command(self.address, terminal=terminal),
            wrap_for_any_shell(f"exec {shlex.join(command_words)}", start_mark, marks_errors=marks_errors),
        ]

    def ask_command(
        self,
        module: str,
        arguments: Sequence[str],
        target_type: type[T],
        *,
        input_bytes: bytes = b"",
        limit_s: float = LIMIT_S,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a shardlab command with --json on the cluster, and return its JSON document, decoded as the type `target_type`.

        module, arguments: as in `make_ssh_command`. input_bytes: standard input of the command. limit_s: time limit of the
        command in seconds.
        must_stop: returns True if the caller no longer waits for the answer; it is called several times a second.
        Raises ShardlabError with the error of the command, or if the document is not of the type `target_type`.
        """
        self.log_in()
        start_mark = secrets.token_hex(8)
        mark_line = f"{start_mark}\n".encode()
        ssh_words = self.make_ssh_command(module, [*arguments, "--json"], start_mark)
        exit_code, *output_streams = _run_remote_command(ssh_words, input_bytes, limit_s, must_stop)
        is_too_large = len(output_streams[0]) >= MOST_BYTES
        json_bytes, errors = output_streams[0].partition(mark_line)[2], output_streams[1].rpartition(mark_line)[2]
        if exit_code is None and not is_too_large:
            raise ShardlabError(f"{self.host}: {module} did not answer within {limit_s:g} s.")
        if json_bytes and not is_too_large and (exit_code is None or exit_code == CONNECTION_FAILED or exit_code < 0):
            raise ShardlabError(f"{self.host}: the connection broke in the middle of an answer; run the same command again.")
        if mark_line not in output_streams[0]:
            stream_texts = [stream.decode("utf-8", "replace") for stream in output_streams]
            raise ShardlabError(describe_lost_command(self.host, exit_code, *stream_texts))
        if not json_bytes:
            error_text = "\n".join(errors.decode("utf-8", "replace").strip().splitlines())  # the lines of ssh end with \\r\\n
            raise ShardlabError(f"{self.host}: {error_text.removeprefix('error: ') or f'exit code {exit_code}, and no answer'}")
        try:
            return get_decoder(target_type).decode(json_bytes)
        except DECODE_FAULTS as error:
            mismatch_reason = f"more than {MOST_BYTES >> 20} MiB" if is_too_large else str(error)
            command_text = " ".join([module, *arguments[:1]])
            raise self.make_mismatch_error(command_text, mismatch_reason) from None

    def make_mismatch_error(self, command_text: str, reason: str) -> ShardlabError:
        """The error for an answer that this release of shardlab cannot read. command_text: the command on the cluster, such as
        `collect fetch`. reason: the reason, as a clause."""
        return ShardlabError(
            f"{self.host}: shardlab {__version__} cannot read the answer of `{command_text}` there ({reason}). Another release "
            "may be installed there. To install this release there, run: provision CLUSTER.yaml"
        )

    def run_interactively(self, module: str, arguments: Sequence[str]) -> int:
        """Run a shardlab command on the cluster, with this terminal as its input if there is one; returns its exit code.

        module, arguments: as in `make_ssh_command`. Raises ShardlabError.
        """
        self.log_in()
        uses_terminal = sys.stdout.isatty() and sys.stdin.isatty()
        start_mark = secrets.token_hex(8)
        ssh_words = self.make_ssh_command(module, arguments, start_mark, terminal=uses_terminal, marks_errors=False)
        exit_code, early_text = terminal_relay.relay_command(ssh_words, uses_terminal=uses_terminal, start_mark=start_mark)
        if early_text is not None and exit_code != CONNECTION_FAILED:
            raise ShardlabError(describe_lost_command(self.host, exit_code, early_text, ""))
        if exit_code == CONNECTION_FAILED:
            raise ShardlabError(f"{self.host}: the connection broke or was refused; submitted runs continue.")
        return exit_code

    def log_in(self) -> None:
        """Open the SSH connection that all commands share, if `shared` is true. The site may ask the user for a code.

        Raises NoLogin.
        """
        if self.shared:
            shared_connection.open_connection(make_ssh_command(self.address), self.host)


def _run_remote_command(
    ssh_words: Sequence[str], input_bytes: bytes, limit_s: float, must_stop: Callable[[], bool]
) -> tuple[int | None, bytes, bytes]:
    """Run the ssh command `ssh_words`. Returns (exit code, standard output, standard error), at most MOST_BYTES of each output.

    input_bytes, limit_s, must_stop: as in `RemoteWorkspace.ask`.
    The exit code is None if the command was ended because its output was too large, `must_stop` returned True, or the time
    limit was over. The output goes to files and not to pipes: an SSH connection that stays open for later commands would keep
    the pipes open.
    """

    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(input_bytes)
        stdin.seek(0)
        deadline = time.monotonic() + limit_s
        exit_code: int | None = None
        with subprocess.Popen(ssh_words, stdin=stdin, stdout=stdout, stderr=stderr) as process:
            try:
                while (exit_code := _wait_for_exit(process)) is None:
                    is_large = any(os.fstat(stream.fileno()).st_size >= MOST_BYTES for stream in (stdout, stderr))
                    if is_large or must_stop() or time.monotonic() > deadline:
                        break
            finally:
                if process.poll() is None:
                    process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return exit_code, stdout.read(MOST_BYTES), stderr.read(MOST_BYTES)


def _wait_for_exit(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of the process, or None if it has not ended after POLL_S seconds."""
    try:
        return process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def find_remote_workspace(workspace: Workspace, cluster: Cluster) -> RemoteWorkspace:
    """The workspace on the cluster in which the runs of `workspace` are stored. Raises InputError.

    If away.json was written for `workspace`, the folder that away.json names is used again. The name of the folder is not
    computed again, because it depends on the path of `workspace`, and the user may have moved `workspace` since.
    """
    from shardlab.workspace import inventory

    if cluster.storage.shared is None and not cluster.has_separate_folders:
        raise InputError(NO_SHARED_FOLDER.format(cluster.name))
    address, remote_python = inventory.find_controller(workspace, cluster)
    folder, workspace_mark = _choose_workspace_folder(workspace, cluster)
    return RemoteWorkspace(
        schema=1,
        cluster=cluster.name,
        host=address.host,
        port=address.port,
        user=address.user,
        identity=str(address.identity) if address.identity else None,
        known_hosts=str(address.known_hosts),
        host_keys=address.host_keys,
        python=remote_python,
        workspace=folder,
        mark=workspace_mark,
        shared=address.shared,
    )


def find_node_workspace(workspace: Workspace, node: InventoryNode) -> RemoteWorkspace:
    """The workspace on a node with a folder of its own. It has the same path as this workspace. Raises InputError if shardlab
    is not installed on the node."""
    if node.python is None:
        raise InputError(f"{node.name}: shardlab is not installed there; run: provision CLUSTER.yaml")
    return RemoteWorkspace(
        schema=1,
        cluster="",
        host=node.host,
        port=node.port,
        user=node.user,
        identity=None,
        known_hosts=str(Path("~/.ssh/known_hosts").expanduser()),
        host_keys="strict",
        python=node.python,
        workspace=str(workspace.path),
        mark=node.name,
    )


def find_twin_workspace(workspace: Workspace, cluster: Cluster) -> Workspace:
    """The workspace on the cluster in which the runs of `workspace` are stored; its path is a path on the cluster.

    Raises InputError.
    """
    return Workspace(Path(_choose_workspace_folder(workspace, cluster)[0]))


def _choose_workspace_folder(workspace: Workspace, cluster: Cluster) -> tuple[str, str]:
    """Choose the folder of the workspace on the cluster. Returns (its path, its mark, which contains the host and the path of
    `workspace` on this machine)."""
    workspaces_folder = cluster.workspaces
    workspace_mark = f"{gethostname()}:{workspace.real_path}\n"
    recorded_workspace = read_remote_workspace(workspace)
    if (
        recorded_workspace is not None
        and PurePosixPath(recorded_workspace.workspace).parent == workspaces_folder
        and _belongs_to_workspace(workspace, recorded_workspace)
    ):
        return recorded_workspace.workspace, recorded_workspace.mark
    return str(workspaces_folder / _make_folder_name(workspace, workspace_mark)), workspace_mark


def _make_folder_name(workspace: Workspace, workspace_mark: str) -> str:
    path_digest = hashlib.sha256(workspace_mark.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in workspace.real_path.name)
    return f"{name[:40]}-{path_digest}"


def _belongs_to_workspace(workspace: Workspace, recorded_workspace: RemoteWorkspace) -> bool:
    """Whether the away.json of a workspace was written for it. False: the workspace is a copy, made together with away.json.

    A workspace that was moved, or that another machine sees under another path, is not a copy and keeps its runs.
    recorded_workspace: the content of away.json.
    """
    original_path = Path(recorded_workspace.mark.partition(":")[2].removesuffix("\n"))
    if original_path.resolve() == workspace.real_path:
        return True
    original_note = json_file.read_json_if_valid(original_path / ".shardlab" / "away.json", RemoteWorkspace)
    # None: no workspace is at the recorded path any more, it was moved
    return original_note is None or original_note.mark != recorded_workspace.mark


def read_remote_workspace(workspace: Workspace) -> RemoteWorkspace | None:
    """The content of away.json in this workspace; None if there is no such file, because the runs are stored here.

    Raises InputError if the file cannot be decoded, and WorkspaceError if it cannot be read.
    """
    fault_template = "is not of this version: {}; remove this file and submit again."
    return json_file.read_json(workspace.shardlab_folder / "away.json", RemoteWorkspace, fault_template)


def read_workspace_to_change(workspace: Workspace) -> RemoteWorkspace | None:
    """The same as `read_remote_workspace`, for a command that changes runs. Also raises InputError if this workspace is a copy
    of another workspace, because the runs on the cluster then belong to the other workspace."""
    remote = read_remote_workspace(workspace)
    if remote is not None and not _belongs_to_workspace(workspace, remote):
        original = remote.mark.partition(":")[2].removesuffix("\n")
        raise InputError(
            f"{workspace.path}: is a copy of {original}, and this command would change the runs of the original on "
            f"{remote.cluster}. For those runs, use --workspace {shlex.quote(original)}; for own runs here, use `jobs submit`."
        )
    return remote


def write_remote_workspace(workspace: Workspace, remote_workspace: RemoteWorkspace) -> None:
    """Write away.json in this workspace, which says where its runs are stored on the cluster. Raises WorkspaceError."""
    files.make_folder(workspace.shardlab_folder)
    files.write_json(workspace.shardlab_folder / "away.json", remote_workspace)
    workspace_trust.extend_consent(workspace, workspace.shardlab_folder / "away.json")


def record_matrix_path(workspace: Workspace, matrix_path: Path) -> None:
    """Record the path of a matrix file on this machine, because the cluster knows only the name of the file.

    Raises WorkspaceError.
    """
    files.make_folder(workspace.shardlab_folder)
    files.write_json(
        workspace.shardlab_folder / MATRIX_PATHS_FILE,
        {**_read_matrix_paths(workspace), matrix_path.name: str(matrix_path.absolute())},
    )


def find_local_matrix_path(workspace: Workspace, remote_path: str) -> str:
    """The path of a matrix file on this machine. remote_path: the path of its copy on the cluster.

    If the path on this machine was not recorded by `record_matrix_path`, `remote_path` is returned.
    """
    remote = read_remote_workspace(workspace)
    was_sent = remote is not None and str(PurePosixPath(remote_path).parent) == f"{remote.workspace}/matrices"
    return _read_matrix_paths(workspace).get(PurePosixPath(remote_path).name, remote_path) if was_sent else remote_path


def _read_matrix_paths(workspace: Workspace) -> dict[str, str]:
    return json_file.read_json_if_valid(workspace.shardlab_folder / MATRIX_PATHS_FILE, dict[str, str]) or {}


def upload_files(remote: RemoteWorkspace, texts: Mapping[str, bytes]) -> None:
    """Upload files into the workspace on the cluster. texts: for each path relative to that workspace, the content of the file.

    Raises ShardlabError.
    """
    content_by_path = {path: text.decode("utf-8", "surrogateescape") for path, text in texts.items()} | {MARK_FILE: remote.mark}
    remote.ask_command("shardlab.remote.upload", [], UploadResult, input_bytes=json.dumps(content_by_path).encode())
