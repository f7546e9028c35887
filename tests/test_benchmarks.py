"""Benchmarks run: what they measure is for people to read, that they still can is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab import host

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "words",
    [
        ("loop.py", "--rounds", "1", "--steps", "1", "--n-embd", "16", "--seq-len", "16"),
        ("instruments.py", "--rounds", "1", "--n-embd", "16", "--seq-len", "16"),
        ("data.py", "--images", "32", "--rounds", "1"),
        ("choices.py", "--cells", "40", "--rounds", "2"),
        ("summarize.py", "--runs", "7", "--steps", "3", "--rounds", "1"),
    ],
    ids=lambda words: words[0],
)
def test_a_benchmark_comes_to_its_end(words, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / words[0], *words[1:]],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(bool(host.observe().gpus), reason="has a GPU: it would begin to measure")
def test_what_needs_a_gpu_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu" / "run.py", "--workspace", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
