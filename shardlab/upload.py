"""Receives files of a workspace on a cluster: reads them from standard input and writes them into the workspace here.

The user's machine sends them with shardlab.remote_workspace. The input is a JSON object that maps the path of each file to its
text.

The templates, own workloads and own strategies of a workspace always arrive together with its cluster file. If a cluster file
arrives, every such file here that did not arrive with it was removed on the user's machine, so it is removed here.

python -m shardlab.upload --workspace DIR --json
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import PurePosixPath

from shardlab import __version__, console, files, plugin_source, workspace_trust
from shardlab.errors import InputError, WorkspaceError
from shardlab.workspace import Workspace

INVENTORY = PurePosixPath(".shardlab/inventory.json")  # the scheduler reads the nodes and their lease there


def main() -> int:
    """Write the files from standard input into the workspace. Returns the exit code."""
    arguments = console.Parser(prog="python -m shardlab.upload", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    received: dict[str, str] = json.load(sys.stdin)
    for name, text in received.items():
        path = PurePosixPath(name)
        is_ours = path.parts[0] in ("runs", ".shardlab") and path != INVENTORY
        if path.is_absolute() or ".." in path.parts or is_ours:
            raise InputError(f"{name!r}: no file may be written there. Allowed: workspace paths outside runs/, .shardlab/.")
        target = workspace.path / path
        content = text.encode("utf-8", "surrogateescape")
        if not target.is_file() or target.read_bytes() != content:
            files.make_folder(target.parent)
            files.write_atomic(target, content)
    if "cluster.yaml" in received:
        plugins = [file for name in plugin_source.CARRIED for file in plugin_source.python_files(workspace.path / name)]
        for file in (*workspace.own_templates.rglob("*.j2"), *plugins):
            if str(file.relative_to(workspace.path)) not in received:
                file.unlink()
        # All code in this workspace came from the user's machine, where the user trusts it, so it is trusted here as well.
        if not workspace_trust.is_trusted(workspace):
            with contextlib.suppress(WorkspaceError):  # home folder not writable: a command that needs the code reports it
                workspace_trust.trust(workspace)
    console.Output.of(arguments).document({"version": __version__})
    return 0


if __name__ == "__main__":
    sys.exit(console.run(main))
