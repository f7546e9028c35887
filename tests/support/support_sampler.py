"""Runs the sampler as a process of its own, as the supervisor of a run does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support_e2e import HANG_S, until

from shardlab.runs.record import Sample, read_records


def start(out: Path, *options: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "collect", "sample", "--out", str(out), *options]
    given = os.environ | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)


def records(out: Path) -> list[Sample]:
    return read_records(out, Sample).records


def sampled(process: "subprocess.Popen[str]", out: Path, more: int = 1) -> None:
    """Wait until the sampler has written `more` further samples to the file `out`."""
    before = len(records(out)) if out.exists() else 0
    until(lambda: process.poll() is not None or len(records(out)) >= before + more, "it writes samples")
    assert process.poll() is None, process.communicate()


def ended(process: "subprocess.Popen[str]") -> dict:
    """End the sampler with SIGTERM, and return the JSON document that it prints."""
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors
    return json.loads(said)
