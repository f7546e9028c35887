"""Hostile text: text that controls a terminal, a workspace whose records contain it, and a terminal that records a command."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import support_collect as support

from shardlab.runs.run import make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

# A hostile text. On a terminal, it sets the title of the window, clears the screen, reverses the reading direction, hides a
# letter, changes the colour by a one-byte control character, rings the bell, deletes, returns to the start of the line and
# breaks the line. It also contains markup of the library rich.
STEERING = (
    "\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\u200b\x9b31m\x07\x7f\rover\x1b[1;1H\n\u2028[bold]b[/bold][link=x]l[/link]:smile:"
)
# Values that a node writes into records. A hostile node can change these values freely, because none of them is an id, a
# path of ours or a word with a fixed meaning.
SAID_BY_NODES = {
    "2.13.0", "Debian GNU/Linux 12", "AMD EPYC 7B13", "NVML: Driver Not Loaded", "eth0", "synthetic-tokens",
    "tokens", "6.1.0", "3.11.2", "/data", "fb940fb5c0ffee00fb940fb5c0ffee00fb940fb5",
}  # fmt: skip


def matrix(path: Path) -> Workspace:
    """Make a workspace in which titles, claims, reasons, host names and logs contain the hostile text STEERING."""
    workspace = support.matrix(path)
    single, ddp, odd = support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2, options={STEERING: STEERING})
    faster = "throughput_per_s(strategy='ddp', launcher='torchrun') / throughput_per_s(strategy='single') >= 1.5"
    printed = {"where": STEERING, "cell": {"strategy": "single"}, "metric": "step_time_ms", "printed": f"102 ms {STEERING}"}
    study: dict[str, Any] = {
        "claims": [{"id": "c1", "says": STEERING, "where": STEERING, "test": faster}],
        "reported": [printed],
        "notes": [{"says": STEERING, "where": STEERING}],
    }
    support.keep(workspace, [single, ddp, odd], title=STEERING, **study)
    support.completed(workspace, odd)
    support.failed(workspace, odd, 2, STEERING)
    for file in workspace.runs.rglob("*.json*"):
        _spoil(file)
    for run in workspace.list_run_dirs():
        run.log.mkdir(exist_ok=True)
        for log in (run.job_log, run.rank_log(0)):
            log.write_bytes(f"{STEERING}\nlast line\n".encode() + b"\x9b31m\xff\n")
    return workspace


def failed_run(workspace: Workspace) -> RunDir:
    """The run that failed for a reason whose text contains STEERING."""
    return workspace.find_run_dir(make_run_id(support.cell("fsdp2", 2, options={STEERING: STEERING}), 2))


def _spoil(file: Path) -> None:
    def spoiled(value: Any) -> Any:
        if isinstance(value, str):
            return STEERING if value in SAID_BY_NODES else value
        if isinstance(value, list):
            return [spoiled(entry) for entry in value]
        return {key: spoiled(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    text = file.read_text()
    kept = []
    for line in text.split("\n") if file.suffix == ".jsonl" else [text]:
        try:
            kept.append(json.dumps(spoiled(json.loads(line))))
        except ValueError:  # this is not JSON: an empty last line, or a line that was cut for a test
            kept.append(line)
    file.write_text("\n".join(kept))


def steering(text: str, allowed: str = "\n") -> list[str]:
    """The characters of a text that control a terminal, change the reading direction or are invisible."""
    bad = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return sorted({repr(char) for char in text if char not in allowed and unicodedata.category(char) in bad})


def on_terminal(argv: Sequence[str], columns: int = 120, **environment: str) -> str:
    """Run a Python command on a terminal, and return everything that it writes.

    argv: the arguments of the interpreter. columns: the width of the terminal. Lines of the result end with a line feed.
    """
    ours, theirs = pty.openpty()
    known = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", **environment}
    process = subprocess.Popen(
        [sys.executable, *argv], stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | known, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux raises OSError when the last process has closed the terminal
            part = b""
        if not part:
            break
        said += part
    os.close(ours)
    process.wait()
    return said.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
