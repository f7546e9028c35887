"""Reads and stores the files in which a workspace describes its matrices: the cluster reads them, and this machine stores them,
because `collect summarize` needs them here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import msgspec

from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.files.files import NotRegular, TooLarge
from shardlab.matrix.expansion import LAST_MATRIX, Expansion, LastMatrix
from shardlab.transfer.manifest import read_file_status
from shardlab.workspace.workspace import Workspace

MATRICES_FOLDER = "matrices"  # the folder in .shardlab that contains the descriptions of matrices
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}\.json")


def read_matrix_descriptions(workspace: Workspace) -> dict[str, bytes]:
    """The files in which this workspace describes its matrices: {path relative to .shardlab: content}.

    A file that is not a regular file, or is too large, is left out. Raises WorkspaceError if a file cannot be read.
    """
    content_by_file = {}
    matrix_files = [
        f"{MATRICES_FOLDER}/{file_name}"
        for file_name in files.list_names(workspace.shardlab_folder / MATRICES_FOLDER)
        if _FILE_NAME.fullmatch(file_name)
    ]
    with files.as_workspace_error("read"):
        for file_name in [*matrix_files, LAST_MATRIX]:
            with contextlib.suppress(NotRegular, TooLarge):
                if read_file_status(workspace.shardlab_folder, file_name) is not None:
                    content_by_file[file_name] = files.read(workspace.shardlab_folder / file_name)
    return content_by_file


def store_matrix_descriptions(workspace: Workspace, received_files: Mapping[str, bytes]) -> None:
    """Store the descriptions of matrices that the cluster sent (the result of `read` there) in this workspace.

    A file with a name that no description has is ignored. Raises ShardlabError if a description is not valid. In this case no
    file of this workspace is changed.
    """
    content_by_file: dict[str, bytes] = {}
    for relative_path in sorted(received_files):
        folder_name, _, file_name = relative_path.rpartition("/")
        if relative_path != LAST_MATRIX and not (folder_name == MATRICES_FOLDER and _FILE_NAME.fullmatch(file_name)):
            continue
        try:
            content_by_file[relative_path] = received_files[relative_path]
            if relative_path == LAST_MATRIX:
                get_decoder(LastMatrix).decode(content_by_file[relative_path])
            else:
                content_by_file[relative_path] = _set_local_path(workspace, content_by_file[relative_path])
            read_file_status(workspace.shardlab_folder.resolve(), relative_path)
        except NotRegular as error:
            raise InputError(
                f"{error.filename} is {error.kind}, and collect fetch writes only to regular files and folders; "
                "remove it and run the same command again."
            ) from None
        except DECODE_FAULTS as error:
            raise ShardlabError(f"the cluster's .shardlab/{relative_path} is not of this version: {error}.") from None
    for relative_path, description in content_by_file.items():
        target_path = workspace.shardlab_folder / relative_path
        if files.read(target_path) != description if target_path.exists() else True:
            files.make_folder(target_path.parent)
            files.write_atomic(target_path, description)


def _set_local_path(workspace: Workspace, description: bytes) -> bytes:
    """The description of a matrix, with the path of the matrix file on this machine in place of the path on the cluster.

    If the path on this machine is not known, the description is not changed.
    """
    from shardlab.remote import remote_workspace  # imported only here: the cluster does not need it

    expansion = get_decoder(Expansion).decode(description)
    local_path = remote_workspace.find_local_matrix_path(workspace, expansion.path)
    return (
        description if local_path == expansion.path else files.encode_json(msgspec.structs.replace(expansion, path=local_path))
    )
