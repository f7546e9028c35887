"""A stand-in for the ranks of a try of a search: if SIZE is larger than a limit, it ends as out of memory.

It is started in the run folder:

python support_search_ranks.py SIZE
"""

import os
import sys
import time
from pathlib import Path

from shardlab.files import files
from shardlab.runs.record import SCHEMA, LineWriter, Result, StepRecord
from shardlab.runs.rundir import RunDir

BEST = 3  # the batch size with the highest throughput


def main(folder: RunDir, size: int) -> int:
    workspace = folder.path.parent.parent
    (folder.path / "ranks").write_text(os.environ.get("SHARDLAB_NODES", ""))
    while (workspace / f"holds-{size}").exists():
        time.sleep(0.05)
    if size > int((workspace / "limit").read_text()):
        folder.write_event("rank-00000", "oom", why="more than the limit")
        return 1
    files.make_folder(folder.steps_file(0).parent)
    with LineWriter(folder.steps_file(0)) as lines:
        lines.write_record(StepRecord(schema=SCHEMA, step=1, t_s=0.0, wall_s=time.time(), units=size, step_ms=1.0))
    files.write_json(
        folder.result,
        Result(
            schema=SCHEMA, run_id=folder.run_id, state="completed", rehearsal=True, steps=1, unit="tokens",
            throughput_per_s=10.0 - abs(size - BEST),
        ),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(RunDir(Path.cwd()), int(sys.argv[1])))
