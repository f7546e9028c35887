"""Stores the files in which the cluster's workspace describes its matrices. `collect summarize` needs these files here."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from collect.fetching.manifest import regular
from shardlab import files, remote_workspace
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError, ShardlabError
from shardlab.expansion import LAST_MATRIX, Expansion, LastMatrix
from shardlab.files import NotRegular
from shardlab.workspace import Workspace

FOLDER = "matrices"
SOURCE = ".shardlab"  # the folder in the workspace on the cluster that contains the descriptions of matrices
# The names that rsync transfers from the workspace on the cluster. The slash makes rsync transfer the files in the folder, too.
NAMES = (f"{SOURCE}/{FOLDER}/", f"{SOURCE}/{LAST_MATRIX}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}\.json")


def store(workspace: Workspace, staging: Path) -> None:
    """Copy the descriptions of all matrices from the staging folder, in which they arrived, into this workspace.

    Raises ShardlabError if a description is not valid. In this case no file of this workspace is changed.
    """
    arrived = [f"{FOLDER}/{name}" for name in files.names(staging / FOLDER) if _NAME.fullmatch(name)]
    contents: dict[str, bytes] = {}
    for name in [*arrived, LAST_MATRIX]:
        try:
            if regular(staging, name) is None:
                continue
            contents[name] = files.read(staging / name)
            if name == LAST_MATRIX:
                decoder(LastMatrix).decode(contents[name])
            else:
                contents[name] = _with_path_here(workspace, contents[name])
            regular(workspace.own.resolve(), name)
        except NotRegular as error:
            raise InputError(
                f"{error.filename} is {error.kind}, and collect fetch writes only to regular files and folders; "
                "remove it and run the same command again."
            ) from None
        except DECODE_FAULTS as error:
            raise ShardlabError(f"the cluster's .shardlab/{name} is not of this version: {error}.") from None
    for name, content in contents.items():
        target = workspace.own / name
        if files.read(target) != content if target.exists() else True:
            files.make_folder(target.parent)
            files.write_atomic(target, content)


def _with_path_here(workspace: Workspace, content: bytes) -> bytes:
    """The description of a matrix, with the path of the matrix file on this machine in place of the path on the cluster.

    If the path on this machine is not known, the description is not changed.
    """
    expansion = decoder(Expansion).decode(content)
    here = remote_workspace.path_here(workspace, expansion.path)
    return content if here == expansion.path else files.as_json(msgspec.structs.replace(expansion, path=here))
