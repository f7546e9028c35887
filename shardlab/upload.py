"""The counterpart of shardlab.remote_workspace on a cluster: reads files of a workspace from standard input.

The input is a JSON object of path to text.

The templates, own workloads and own strategies of a workspace arrive all together, with its cluster file. A file of these that
does not arrive with a cluster file was removed on the user's machine, so it is removed here.

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
    """Write the files of standard input, a JSON object of names and texts, into the workspace; return the exit code."""
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
        # The workspace was made for the user's machine, and all code that is here now came from there, where it is trusted.
        if not workspace_trust.is_trusted(workspace):
            with contextlib.suppress(WorkspaceError):  # a home that cannot be written: a command that needs the code says so
                workspace_trust.trust(workspace)
    console.Output.of(arguments).document({"version": __version__})
    return 0


if __name__ == "__main__":
    sys.exit(console.run(main))
