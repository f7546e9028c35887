"""Lists the files of this node's parts of runs, with their SHA-256. The first node runs this program (collect.fetching.gather).

    python -m collect.fetching.part_manifest --workspace DIR --json

Standard input: a JSON list of run ids. Standard output: a ListedPart for each of these runs of which this node has a part.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec
import psutil

from shardlab.files import json_file
from shardlab.record_types import RunId
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.transfer import manifest
from shardlab.transfer.manifest import RunManifest
from shardlab.workspace.workspace import Workspace

END_LIMIT_S = 5.0  # how long to wait at most for the end of the processes of a run that has just ended


class ListedPart(msgspec.Struct):
    """A node's part of a run."""

    manifest: RunManifest
    in_use: bool
    """Whether a process still works in the folder of this part, e.g. a rank that lost its connection."""
    has_claim: bool
    """Whether this is the run folder on the first node, which contains the folder `claim`."""


def is_in_use(folder: Path) -> bool:
    """Whether any process has this folder as its working directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder.resolve()):
                return True
    return False


def _list_part(run: RunDir) -> ListedPart:
    deadline_s = time.monotonic() + END_LIMIT_S
    # The processes are checked before the files are listed, because the records are complete only after the processes have
    # ended. A folder with the folder `claim` is on the first node. It is not checked, because the supervisor of the run may
    # still be ending there.
    while (in_use := not run.claim.exists() and is_in_use(run.path)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return ListedPart(manifest.make_manifest(run, manifest.list_files(run.path), is_complete=False), in_use, run.claim.exists())


def main() -> int:
    """Print the parts of the runs that standard input names, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.part_manifest", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    run_ids = json_file.decode_standard_input(sys.stdin.buffer.read(), list[RunId], "a list of run ids")
    run_dirs = [RunDir(workspace.runs / run_id) for run_id in run_ids]
    console.Output.from_arguments(arguments).print_document([_list_part(part) for part in run_dirs if part.run_json.exists()])
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
