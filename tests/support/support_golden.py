"""Compares a whole text with a golden file (a file with the expected text), and makes a run for tests that use golden files."""

import os
from pathlib import Path

import msgspec
from support_cells import CELL

from shardlab.matrix import cell as cells
from shardlab.runs.run import Run, World

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTILE = '/tmp/it\'s "here"\n; touch owned; $(touch owned) `touch owned` #'


def same_as_golden(name: str, text: str) -> None:
    """Check that a text equals its golden file. With `make golden`, the text is written to the golden file first."""
    path = GOLDEN / name
    if os.environ.get("SHARDLAB_GOLDEN") == "write":
        path.write_text(text)
    assert path.exists(), f"there is no golden file {path}: make golden, then read the diff"
    assert text == path.read_text(), "if the change is meant: make golden, then read the diff"


def run_of(launcher: str) -> Run:
    cell = msgspec.structs.replace(CELL, launcher=launcher)
    return Run(
        schema=1,
        run_id="ddp-gpt2-tiny-0123456789ab-r1",
        matrix="m",
        cell=cell,
        cell_hash=cells.compute_cell_hash(msgspec.to_builtins(cell)),
        repeat=1,
        attempt=1,
        launcher=launcher,
        rehearsal=launcher == "fork",
        world=World(1, 2, 2),
        cluster={"name": "local", "provider": "local"},
        data_path="/data",
        versions={"shardlab": "0.0.0"},
        git_commit=None,
        templates={},
        created="2026-01-01T00:00:00+00:00",
        source="/work space/.shardlab/source/0123456789ab",
        packages="ba9876543210",
    )
