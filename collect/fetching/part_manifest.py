"""Lists the files of this node's parts of runs, with their SHA-256, for the first node (collect.fetching.gather).

    python -m collect.fetching.part_manifest --workspace DIR --json

Standard input: a JSON list of run ids. Standard output: a ListedPart of each run of which this node has a part.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import msgspec
import psutil

from collect.fetching import manifest
from collect.fetching.manifest import RunManifest
from shardlab import console
from shardlab.errors import InputError
from shardlab.run import RUN_ID
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

ENDS_S = 5.0  # how long processes of a run that just ended may take to end


class ListedPart(msgspec.Struct):
    """A node's part of a run. in_use: whether a process works in its folder, as ranks do that outlive their connection.
    has_claim: it is the run's folder on the first node, in which the claim is."""

    manifest: RunManifest
    in_use: bool
    has_claim: bool


def is_in_use(folder: Path) -> bool:
    """Whether the working folder of any process is this folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder.resolve()):
                return True
    return False


def _listed(part: RunDir) -> ListedPart:
    ends = time.monotonic() + ENDS_S
    # Looked at before the files are listed: the records of a process that has ended are complete. The first node, which has the
    # claim, is asked too; there the supervisor may be ending.
    while (in_use := not part.claim.exists() and is_in_use(part.path)) and time.monotonic() < ends:
        time.sleep(0.1)
    return ListedPart(manifest.make(part, manifest.list_files(part), complete=False), in_use, part.claim.exists())


def main() -> int:
    """Answer the first node; return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.part_manifest", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    except msgspec.DecodeError as error:
        raise InputError(f"standard input: is not a list of run ids: {error}.") from None
    parts = [RunDir(workspace.runs / run_id) for run_id in asked if RUN_ID.fullmatch(run_id)]
    console.Output.of(arguments).document([_listed(part) for part in parts if part.run_json.exists()])
    return 0


if __name__ == "__main__":
    sys.exit(console.run(main))
