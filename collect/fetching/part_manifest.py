"""Lists the files of this node's parts of runs, with their SHA-256, for the first node (collect.fetching.gather).

    python -m collect.fetching.part_manifest --workspace DIR --json

Standard input: a JSON list of run ids. Standard output: a manifest of each run of which this node has a part.
"""

from __future__ import annotations

import sys

import msgspec

from collect.fetching import manifest
from shardlab import console
from shardlab.errors import InputError
from shardlab.run import RUN_ID
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace


def main() -> int:
    """Answer the first node; return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.part_manifest", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    except msgspec.DecodeError as error:
        raise InputError(f"standard input: is not a list of run ids: {error}.") from None
    parts = [RunDir(workspace.runs / run_id) for run_id in asked if RUN_ID.fullmatch(run_id)]
    found = [manifest.make(part, manifest.list_files(part), complete=False) for part in parts if part.run_json.exists()]
    console.Output.of(arguments).document(found)
    return 0


if __name__ == "__main__":
    sys.exit(console.run(main))
