"""A workspace with an awkward name, and the commands run in it as a person runs them."""

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

from shardlab.record import Event, StepRecord
from shardlab.rundir import RunDir

HANG_S = 900.0  # after which a process is taken for hung; nothing else is said by it, as machines differ in speed and load
# vgg16-tiny: its ranks need half of the processor time to start, because they do not import transformers.
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


# Only a test that fails takes so long: imports on a cold and busy machine take minutes, and no test measures that.
PATIENCE_S = 600.0


class Bench:
    """A workspace and its commands."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a 'b' \"c\" $d; e"
        self.path.mkdir()

    def matrix(self, more: str, *, steps: int = 3) -> str:
        """Write a matrix file and give its name for --matrix."""
        (self.path / "small.yaml").write_text(MATRIX.format(steps=steps, more=more))
        return str(self.path / "small.yaml")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", words[0], *words[1:], "--workspace", str(self.path)]

    def run(self, *words: str, code: int = 0, limit_s: float = PATIENCE_S, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of ours to its end and hold its exit code."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=limit_s, check=False, **options)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def json(self, *words: str, code: int = 0, limit_s: float = PATIENCE_S) -> Any:
        return json.loads(self.run(*words, "--json", code=code, limit_s=limit_s).stdout)

    def states(self) -> dict[str, str]:
        return {run["id"]: run["state"] for run in self.json("jobs", "status")["runs"]}

    def folders(self) -> list[RunDir]:
        """The run folders, hidden ones (half rendered) left out; none where nothing is rendered yet."""
        return [RunDir(path.parent) for path in sorted((self.path / "runs").glob("[!.]*/run.json"))]

    def logs(self) -> str:
        """Every log of the workspace, for the message of a test that fails."""
        return logs(self.path)


def benches(folder: Path) -> Iterator[Bench]:
    """One, in which nothing is at work any more at the end."""
    made = Bench(folder)
    yield made
    made.run("jobs", "cancel", "--all")
    for process in processes_of(made.path):  # a test that failed may leave some
        process.kill()


def time_limit_s(folder: Path) -> int:
    """A time limit, in seconds, before which a run with two forked ranks makes steps on this machine as busy as it is now.

    A limit begins with the run and not with its first step, so a first run has the fork server import everything, and a
    second one is measured.
    """
    folder.mkdir()
    measured = Bench(folder)
    name = measured.matrix("axes: {strategy: [ddp], gpus: [2]}\nrepeats: 2")
    measured.run("jobs", "submit", "--matrix", name, "--wait")
    _, second = measured.folders()
    start = next(event.wall_s for event in second.events() if event.event == "started")
    return round(10 + 3 * (second.steps(0).records[0].wall_s - start))


def clock(seconds: int) -> str:
    """As a matrix file has a time."""
    return f"00:{seconds // 60:02d}:{seconds % 60:02d}"


def holds_pause(record: StepRecord, stood_still: Event) -> bool:
    """Whether the middle of a pause lies within a step."""
    middle = stood_still.wall_s - stood_still.data["seconds"] / 2
    return record.wall_s - record.step_ms / 1000 < middle < record.wall_s


def logs(folder: Path) -> str:
    """The end of every log of the runs and runners below a folder, for the message of a test that fails."""
    files = sorted({*folder.glob("**/runs/*/log/**/*.log"), *folder.glob("**/.shardlab/**/*.log")})
    return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def until(true: Callable[[], Any], what: str, limit_s: float = PATIENCE_S, *, least_pause_s: float = 0.05) -> Any:
    """Look again until it is true; what it gave. A look that starts a process has a pause that leaves others the processor."""
    deadline = time.monotonic() + limit_s
    while (begun := time.monotonic()) < deadline:
        if found := true():
            return found
        time.sleep(max(least_pause_s, 2 * (time.monotonic() - begun)))
    raise AssertionError(f"{what}: not within {limit_s} s")


def started(folder: RunDir) -> dict[str, Any] | None:
    """What the supervisor of a run said when it started, or None."""
    return next((event.data for event in folder.events() if event.event == "started"), None)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that work in this folder or name it on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid != os.getpid() and (any(str(folder) in word for word in words) or process.cwd() == str(folder)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
