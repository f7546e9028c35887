"""Sends the folders of commands from a user's machine to the workspace on a cluster.

The user's machine asks whether the cluster has a copy with the same digest, and sends the files as a tar archive if not. On the
cluster, this program receives them:

python -m jobs.plugins.send_folder DIGEST --workspace DIR --json
"""

from __future__ import annotations

import io
import sys
import tarfile
import zlib
from collections.abc import Collection

import msgspec

from jobs.plugins import command_folder, plugin_store
from jobs.plugins.command_folder import CommandFolder
from shardlab.errors import InputError
from shardlab.plugins import command_copies
from shardlab.remote.remote import compute_sending_limit_s
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.terminal import console
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace


class FolderAnswer(msgspec.Struct):
    """What this program prints on the cluster."""

    is_frozen: bool
    """Whether the workspace on the cluster has an undamaged copy of the folder."""


def send_folders(remote: RemoteWorkspace, folders: Collection[CommandFolder]) -> None:
    """Send the folders of which the workspace on the cluster has no copy. Raises ShardlabError."""
    for folder in folders:
        if not remote.ask_command(__name__, [folder.digest], FolderAnswer).is_frozen:
            packed_folder = command_copies.pack_files(folder.path, folder.files)
            limit_s = compute_sending_limit_s(packed_folder)
            remote.ask_command(__name__, [folder.digest], FolderAnswer, input_bytes=packed_folder, limit_s=limit_s)


def unpack_folder(workspace: Workspace, digest: str, packed_folder: bytes) -> None:
    """Write the files of a command's folder into the store of a workspace.

    packed_folder: as `command_copies.pack_files` makes it. Raises InputError if the files do not have this digest, or if a path
    leads out of the folder; then the store is unchanged.
    """
    store = plugin_store.find_store(workspace)
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(packed_folder)) as archive,
            command_folder.open_new_copy(store, digest, f"the folder {digest}: did not arrive whole") as new_folder,
        ):
            archive.extractall(new_folder, _list_members(archive), filter=_keep_link)
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise InputError(f"the folder {digest}: did not arrive whole: {error}.") from None


def _list_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The members of an archive. Raises InputError, before any is written, if they are more than a command may have."""
    members: list[tarfile.TarInfo] = []
    total_bytes = 0
    for member in archive:
        members.append(member)
        total_bytes += member.size
        if len(members) > command_copies.MOST_FILES or total_bytes > command_copies.MOST_BYTES:
            raise InputError(
                f"the folder of a command has more than {command_copies.MOST_FILES} files or "
                f"{command_copies.MOST_BYTES / 1e6:.0f} MB. Allowed: fewer files and bytes."
            )
    return members


def _keep_link(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """As tarfile's filter `data`, which refuses paths that lead out, but a link keeps its text, which is part of the digest."""
    return tarfile.data_filter(member, folder).replace(linkname=member.linkname, deep=False)


def main() -> int:
    """Answer whether the workspace has the folder; if standard input has an archive, unpack it first. Returns the exit code."""
    parser = console.Parser(prog=f"python -m {__name__}", parents=[console.common_options()])
    parser.add_argument("digest", help="the digest of the files")
    arguments = parser.parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    packed_folder = sys.stdin.buffer.read()
    if packed_folder:
        workspace_trust.begin_workspace(workspace)
        unpack_folder(workspace, arguments.digest, packed_folder)
    is_frozen = command_folder.has_frozen_copy(plugin_store.find_store(workspace), arguments.digest)
    console.Output.from_arguments(arguments).print_document({"is_frozen": is_frozen})
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
