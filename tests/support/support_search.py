"""A workspace whose matrix searches for a batch size. Only the ranks are stand-ins (support_search_ranks); all other processes
are real."""

import subprocess
import sys
import time
from pathlib import Path

from support_e2e import HANG_S
from support_trust import make_own

from jobs.status import reconcile
from shardlab.runs.rundir import RunDir

MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: ddp, gpus: 1, seq_len: 16, steps: 1, prove: "off", launcher: fork}
search: {key: gpu_batch_size, for: GOAL, at_most: 8}
"""
# The template of the job script of a try. If the file `dies-SIZE` exists, the script kills itself before it starts the
# supervisor, as if all processes of the run had been killed.
SCRIPT = """\
#!/bin/bash
{% for option in options | default([]) %}
#SBATCH {{ option }}
{% endfor %}
cd {{ folder | quote }}
size={{ run.cell.micro_batch_size }}
if rm ../../dies-$size 2>/dev/null; then kill -9 $$; fi
export SHARDLAB_SOURCE={{ run.source | quote }} PYTHONUNBUFFERED=1
export PYTHONPATH="$SHARDLAB_SOURCE${PYTHONPATH:+:$PYTHONPATH}"
exec PYTHON -m jobs.supervisor.attempt . -- PYTHON RANKS $size
"""


class SearchedWorkspace:
    """A workspace with a matrix that searches a batch size from 1 to 8.

    template: the name of the template of the job script; with `ssh.sh`, ranks are started over SSH. goal: the goal of the
    search. limit: the largest size that fits. While the file `holds-SIZE` exists, a try of this size does not end.
    """

    def __init__(self, folder: Path, template: str = "local.sh", goal: str = "largest_that_fits", limit: int = 2) -> None:
        self.workspace = make_own(folder)
        path = self.workspace.own_templates / "launch" / f"{template}.j2"
        path.parent.mkdir(parents=True)
        ranks = str(Path(__file__).parent / "support_search_ranks.py")
        script = SCRIPT if template != "ssh.sh" else SCRIPT.replace("-- ", "-- PYTHON -m jobs.ssh.step . -- ")
        path.write_text(script.replace(" PYTHON ", f" {sys.executable} ").replace("RANKS", ranks))
        self.matrix = folder / "m.yaml"
        self.matrix.write_text(MATRIX.replace("GOAL", goal))
        (folder / "limit").write_text(str(limit))

    def jobs(self, verb: str, *words: str, code: int = 0) -> str:
        """Run a command of `jobs`, check its exit code, and return what it prints. code: the expected exit code."""
        more = ["--matrix", str(self.matrix)] if verb in ("submit", "plan") else []
        command = [sys.executable, "-m", "jobs", verb, *more, *words, "--workspace", str(self.workspace.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout

    def folders(self) -> list[RunDir]:
        """The folders of all runs, in the order in which they were made."""
        return sorted(self.workspace.list_run_dirs(), key=lambda folder: min(event.wall_s for event in folder.read_events()))

    def sizes(self) -> list[int]:
        """The batch sizes of all runs, in the order in which their folders were made."""
        return [folder.read_run().cell.micro_batch_size for folder in self.folders()]

    def states(self) -> dict[str, str]:
        """The state of each run, by its size and attempt, such as `4` and `4-a2`."""
        runs = reconcile.read_statuses(self.workspace, self.folders())
        return {
            f"{run.cell['micro_batch_size']}{f'-a{run.attempt}' if run.attempt > 1 else ''}": run.state
            for run in runs
            if run.cell
        }

    def flag(self, name: str) -> Path:
        """Make a file that the script or the ranks of a try look for."""
        path = self.workspace.path / name
        path.touch()
        return path

    def when_started(self, size: int) -> RunDir:
        """Wait until the ranks of the try of this batch size have started, and return its run folder."""
        while True:
            for folder in self.folders():
                if folder.read_run().cell.micro_batch_size == size and (folder.path / "ranks").exists():
                    return folder
            time.sleep(0.05)
