"""Replaces files of a workspace by other kinds of files, and runs commands in it, each of which must end with a sentence.

As a program, it reads cases as lines of JSON, and prints a line before and after each command. The lines show at which command
the program was ended, by a signal after HANG_S seconds or by the limit of its memory.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import support_collect as support
from support_e2e import HANG_S

from shardlab.files import files
from shardlab.workspace.workspace import Workspace

MEMORY = 3 << 30  # bytes that a command may allocate; /dev/zero would take any number
SECRET = "root:$6$THE-SECRET:19000:0:99999:7:::"
MATRIX = """\
schema: 1
name: mine
defaults: {workload: gpt2-tiny, strategy: single, gpus: 1, global_batch_size: 8, seq_len: 16, steps: 1, prove: "off"}
"""
INVENTORY = {"schema": 1, "cluster": "c", "nodes": [{"name": "n", "host": "127.0.0.1", "roles": ["controller", "worker"]}]}
# What stands in place of a file. secret: a file outside of the workspace that only this user can read.
KINDS: dict[str, Callable[[Path, Path], object]] = {
    "FIFO": lambda path, _secret: os.mkfifo(path),
    "device": lambda path, _secret: path.symlink_to("/dev/zero"),
    "link": lambda path, secret: path.symlink_to(secret),
    "folder": lambda path, _secret: path.mkdir(),
}
# The files of a workspace, one of each kind. RUN: the folder of a run.
PLACES = (
    "cluster.yaml", "mine.yaml", "templates/launch/local.sh.j2", "workloads/own.py", "workloads/own.json", "strategies/own.py",
    "metrics/own.py", "archive.shardlab.zip", "report/index.html", "report/summary.json",
    *(f".shardlab/{name}" for name in (
        "inventory.json", "away.json", "trusted.json", "last-matrix.json", "matrices/quickstart.json", "power/quickstart.json",
        "known_hosts", "submissions/t.0123456789.json", "local/runner.json", "local/runner.log", "local/runner.lock",
        "runs.lock", "fetch.lock", "provision.lock", "rehearsals", "source",
    )),
    *(f"RUN/{name}" for name in (
        "run.json", "result.json", "events.attempt.jsonl", "events.controller.jsonl", "steps/rank-00000.jsonl", "steps",
        "samples/node0.jsonl", "env/node0.json", "validation.jsonl", "manifest.json",
        "prediction.json", "log/job.log", "log/rank-00000.log", "job.sh", "claim/job", "trace/rank-00000.json.gz",
        "trace/.figures.json", "memory/rank-00000.json", "memory/rank-00000.snapshot.json.gz", "checkpoints",
    )),
)  # fmt: skip
MAY_BE_LINKS = ("cluster.yaml", "mine.yaml")  # the user names them; an error of such a file shows its content to this user
# The verbs of the commands. They run one after another in the same workspace.
VERBS = (
    "jobs status", "jobs status --json", "jobs logs RUN", "jobs workloads", "jobs strategies", "jobs retry --only oom",
    "collect fetch", "collect summarize", "collect verdicts", "collect explain single step_time_ms", "collect trace RUN",
    "collect timeline RUN", "collect compare . .", "collect export --to csv --out exported", "collect history . .",
    "collect archive --out archive.shardlab.zip", "collect open archive.shardlab.zip --out opened", "collect metrics",
    "jobs plan --matrix mine.yaml", "jobs render --matrix mine.yaml", "jobs submit --matrix mine.yaml --dry-run",
    "jobs cancel --all", "provision plan",
)  # fmt: skip


def workspace(folder: Path) -> Workspace:
    """A workspace with runs that have all files that are read."""
    made = Workspace(folder)
    single, ddp = support.cell(), support.cell("ddp", 2)
    support.keep(made, [single, ddp])
    run = support.completed(made, single)
    support.completed(made, ddp)
    for name in ("trace/rank-00000.json.gz", "memory/rank-00000.snapshot.json.gz"):
        (run.path / name).parent.mkdir()
        (run.path / name).write_bytes(gzip.compress(b'{"traceEvents": []}'))
    files.write_json(made.shardlab_folder / "inventory.json", INVENTORY)
    (folder / "cluster.yaml").write_text("schema: 1\nname: c\nprovider: local\n")
    (folder / "mine.yaml").write_text(MATRIX)
    return made


def damage(folder: Path, place: str, kind: str, secret: Path) -> str:
    """Replace a file of the workspace in `folder`. Returns the id of the run to which the file belongs, or of any run."""
    run = next(path for path in sorted((folder / "runs").iterdir()) if path.name.startswith("single"))
    path = folder / place.replace("RUN", f"runs/{run.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, secret)
    return run.name


def execute(line: str, run: str) -> tuple[int | str, str]:
    """Run a verb in this process and in the current folder. Returns (exit code, output); an exception as text has no code."""
    program, *words = line.replace("RUN", run).split()
    main = __import__(f"{program}.cli", fromlist=["main"]).main
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 - the test shows it
            return "traceback", traceback.format_exc()
    return code, said.getvalue()


def program() -> None:
    """Execute the cases of standard input: [folder of a workspace, new folder, place, kind, secret, verbs]."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for line in sys.stdin:
        source, folder, place, kind, secret, verbs = json.loads(line)
        shutil.copytree(source, folder)
        os.chdir(folder)
        run = damage(Path(folder), place, kind, Path(secret))
        for verb in verbs:
            print(json.dumps([place, kind, verb]), flush=True)
            signal.alarm(round(HANG_S))
            answer = execute(verb, run)
            signal.alarm(0)
            print(json.dumps(answer), flush=True)
        os.chdir("/")
        shutil.rmtree(folder)


if __name__ == "__main__":
    program()
