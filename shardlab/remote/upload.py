"""A program that is executed on a cluster: reads files from standard input and writes them into the workspace on the cluster.

The user's machine sends the files of its own workspace with shardlab.remote.remote_workspace. The input is a JSON object that
maps the path of each file to its text.

The templates, workload files and strategy files of a workspace are always sent together with its cluster file. If the input
contains a cluster file but lacks a template, workload file or strategy file that is on the cluster, the user has removed this
file. The program then removes it on the cluster, too.

python -m shardlab.remote.upload --workspace DIR --json
"""

from __future__ import annotations

import json
import sys
from pathlib import PurePosixPath

from shardlab import __version__
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.terminal import console
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

INVENTORY = PurePosixPath(".shardlab/inventory.json")  # the only file of .shardlab that may be sent: it lists nodes and lease


def main() -> int:
    """Write the files from standard input into the workspace. Returns the exit code."""
    arguments = console.Parser(prog="python -m shardlab.remote.upload", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    received_texts: dict[str, str] = json.load(sys.stdin)
    workspace_trust.begin_workspace(workspace)
    for name, file_text in received_texts.items():
        relative_path = PurePosixPath(name)
        is_private = relative_path.parts[0] in ("runs", ".shardlab") and relative_path != INVENTORY
        if relative_path.is_absolute() or ".." in relative_path.parts or is_private:
            raise InputError(f"{name!r}: no file may be written there. Allowed: workspace paths outside runs/, .shardlab/.")
        target_path = workspace.path / relative_path
        file_bytes = file_text.encode("utf-8", "surrogateescape")
        if not target_path.is_file() or files.read(target_path) != file_bytes:
            files.make_folder(target_path.parent)
            files.write_atomic(target_path, file_bytes)
            workspace_trust.extend_consent(workspace, target_path)
    if "cluster.yaml" in received_texts:
        plugin_paths = [
            plugin_path
            for name in plugin_source.CARRIED_FOLDERS
            for plugin_path in plugin_source.list_code_files(workspace.path / name)
        ]
        for sent_file in (*workspace.list_template_files(), *plugin_paths):
            if str(sent_file.relative_to(workspace.path)) not in received_texts:
                sent_file.unlink()
    console.Output.from_arguments(arguments).print_document({"version": __version__})
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
