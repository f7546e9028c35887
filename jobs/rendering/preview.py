"""Scripts for reading: those of runs that will start on a cluster to which nobody has to log in.

A preview is made from the cluster file alone. If `provision` has not run, the path of the interpreter is not known: a word
stands for it in the script, and a comment at the top says so.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.remote import remote_workspace
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

UNKNOWN_FOLDER = "python-DIGEST"


class Preview(msgspec.Struct, frozen=True):
    """How the scripts of a preview differ from those of runs that start on this machine."""

    workspace_path: Path
    """The workspace on the cluster, in which the runs will be."""
    interpreter: str
    """The interpreter on the cluster; if it is not known, its path contains UNKNOWN_FOLDER."""
    unknown_notes: tuple[str, ...]
    """A sentence for each thing that is not known before `provision`."""


def make_preview(workspace: Workspace, cluster: Cluster, *, on_login_node: bool) -> Preview:
    """The preview of runs of this workspace. on_login_node: whether the runs will be in this workspace itself."""
    workspace_folder = workspace.path if on_login_node else remote_workspace.find_twin_workspace(workspace, cluster).path
    interpreter = find_cluster_python(workspace, cluster)
    if interpreter is not None:
        return Preview(workspace_folder, interpreter, ())
    unknown_note = f"{UNKNOWN_FOLDER} stands for the folder of the Python environment, which `provision` makes"
    return Preview(workspace_folder, str(cluster.workspaces.parent / UNKNOWN_FOLDER / "bin" / "python"), (unknown_note,))


def find_cluster_python(workspace: Workspace, cluster: Cluster) -> str | None:
    """The interpreter on the cluster; None if the workspace has no inventory of this cluster."""
    try:
        return inventory.find_controller(workspace, cluster)[1]
    except InputError:
        return None
