"""A workspace whose path has quotes, spaces and `$`, and functions that run our commands in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shardlab.runs.record import Event, StepRecord
from shardlab.runs.rundir import RunDir

# The time limit of everything that a test waits for, in seconds: after this time a process counts as hung. It is long, because
# imports on a cold and busy machine take minutes. Only a test that fails waits so long.
HANG_S = 900.0
# The workload is vgg16-tiny: its ranks need half of the processor time to start, because they do not import transformers.
MATRIX = """\
schema: 1
name: small
defaults:
  workload: vgg16-tiny
  launcher: fork
  global_batch_size: 4
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.1}}
{more}
"""


class Bench:
    """A workspace, and functions that run commands in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a 'b' \"c\" $d; e"
        self.path.mkdir()

    def matrix(self, more: str, *, steps: int = 3) -> str:
        """Write a matrix file, and return its path for --matrix."""
        (self.path / "small.yaml").write_text(MATRIX.format(steps=steps, more=more))
        return str(self.path / "small.yaml")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", words[0], *words[1:], "--workspace", str(self.path)]

    def run(self, *words: str, code: int = 0, limit_s: float = HANG_S, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one of our commands to its end, and check its exit code."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=limit_s, check=False, **options)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def json(self, *words: str, code: int = 0, limit_s: float = HANG_S) -> Any:
        return json.loads(self.run(*words, "--json", code=code, limit_s=limit_s).stdout)

    def states(self) -> dict[str, str]:
        return {run["id"]: run["state"] for run in self.json("jobs", "status")["runs"]}

    def folders(self) -> list[RunDir]:
        """The run folders of rendered runs. A run that is only partly rendered has a hidden folder, which is left out."""
        return [RunDir(path.parent) for path in sorted((self.path / "runs").glob("[!.]*/run.json"))]

    def logs(self) -> str:
        """The end of every log of the workspace, for the error message of a test that fails."""
        return logs(self.path)


def benches(folder: Path) -> Iterator[Bench]:
    """Yield a Bench. At the end, its runs are cancelled and the processes that they left are killed."""
    made = Bench(folder)
    yield made
    made.run("jobs", "cancel", "--all")
    for process in processes_of(made.path):  # a failed test may leave processes
        process.kill()


def make_second_environment(folder: Path) -> Path:
    """Make a virtual environment with the packages of this interpreter. Returns its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    paths = [entry for entry in sys.path if Path(entry).is_absolute() and Path(entry).is_dir()]
    (packages / "paths.pth").write_text("".join(f"{path}\n" for path in paths))
    return packages


def time_limit_s(folder: Path) -> int:
    """Measure a time limit in seconds that lets two forked ranks record their first steps under the present load.

    A time limit starts with the run and not with its first step. So the first run makes the fork server import everything, and
    the start of the second run is measured.
    """
    folder.mkdir()
    measured = Bench(folder)
    name = measured.matrix("axes: {strategy: [ddp], gpus: [2]}\nrepeats: 2")
    measured.run("jobs", "submit", "--matrix", name, "--wait")
    _, second = measured.folders()
    start = next(event.wall_s for event in second.read_events() if event.event == "started")
    return round(20 + 3 * (second.steps(0).records[0].wall_s - start))


def clock(seconds: int) -> str:
    """A time as matrix files write it, HH:MM:SS."""
    return f"00:{seconds // 60:02d}:{seconds % 60:02d}"


def holds_pause(record: StepRecord, stood_still: Event) -> bool:
    """Whether the middle of a suspension lies between the start and the end of a step.

    record: the record of the step. stood_still: the event that the process wrote when the suspension had ended.
    """
    middle = stood_still.wall_s - stood_still.data["seconds"] / 2
    return record.wall_s - record.step_ms / 1000 < middle < record.wall_s


def logs(folder: Path) -> str:
    """The end of every log of the runs and runners below a folder, for the error message of a test that fails."""
    files = sorted({*folder.glob("**/runs/*/log/**/*.log"), *folder.glob("**/.shardlab/**/*.log")})
    return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def until(true: Callable[[], Any], what: str, limit_s: float = HANG_S, *, least_pause_s: float = 0.05) -> Any:
    """Call `true` until its result is true, and return the result. The test fails after limit_s seconds.

    what: what the test waits for, in words. Between two calls, this function sleeps for twice as long as a call takes, so that
    other processes get the processor.
    """
    deadline = time.monotonic() + limit_s
    while (begun := time.monotonic()) < deadline:
        if found := true():
            return found
        time.sleep(max(least_pause_s, 2 * (time.monotonic() - begun)))
    raise AssertionError(f"{what}: not within {limit_s} s")


def started(folder: RunDir) -> dict[str, Any] | None:
    """The data of a run's event `started`; None if the run has not started."""
    return next((event.data for event in folder.read_events() if event.event == "started"), None)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that belong to a folder: their working folder lies in it, or their command line contains its path.

    A fork server is left out unless its socket is in the folder. It works in the copied source of the workspace that started
    it, but it serves all workspaces of this user, and stays for a while after the last run.
    """
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_named = any(str(folder) in word for word in words)
            cwd = Path(process.cwd())
            works_there = cwd.is_relative_to(folder) and cwd.parent.parts[-2:] != (".shardlab", "source")
            if process.pid != os.getpid() and (is_named or works_there):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
