"""Runs `collect watch` as a process of its own, and makes runs whose records grow while it serves them."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import support_collect as support
from support_document_keys import wrong
from support_e2e import HANG_S

from shardlab.runs.record import SCHEMA, LineWriter, StepRecord

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m\u202e&amp;"


@contextlib.contextmanager
def served(workspace, *options):
    """Start `collect watch` and yield the address of its page.

    At the end, Ctrl-C must end the server with exit code 0.
    """
    command = [sys.executable, "-m", "collect", "watch", "--json", "--workspace", str(workspace.path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            text = ""
            while not text.endswith("}\n"):
                line = server.stdout.readline()
                assert line, server.stderr.read()
                text += line
            assert wrong("collect watch", json.loads(text)) == []
            yield json.loads(text)["url"]
        finally:
            server.send_signal(signal.SIGINT)
            try:
                code = server.wait(HANG_S)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
    assert code == 0


def asked(url, path="", method="GET", **headers):
    """Send one request; returns (status, headers, body).

    path: relative to the page's address with its token, unless it begins with a slash.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
    connection.request(method, path if path.startswith("/") else parts.path + path, headers=headers)
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, dict(answer.getheaders()), answer.read()


def running(workspace, strategy="ddp", steps=100, done=20, **options):
    """Write the records of a run of two ranks that started now and is running.

    done: the number of timed steps that the run has recorded.
    """
    what = support.cell(strategy, 2, steps=steps)
    folder = support.prepare(workspace, what)
    with LineWriter(folder.events_file("node")) as lines:
        now = time.time()
        lines.write_record(support.Event(schema=SCHEMA, event="started", writer="node", wall_s=now, host=support.HOST))
    support.environment(folder)
    support.train(folder, steps=done, **options)
    return folder


def step(folder, number, loss, rank=None):
    """Append one timed step for each rank, or only for the given rank."""
    for each in range(folder.read_run().cell.gpus) if rank is None else [rank]:
        record = StepRecord(schema=SCHEMA, step=number, t_s=number, wall_s=time.time(), units=256, step_ms=50 + each, loss=loss)
        with LineWriter(folder.steps_file(each)) as lines:
            lines.write_record(record)


def replaced(path: Path, content: bytes) -> None:
    """Replace a file by another file with this content."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(content)
    fresh.rename(path)
