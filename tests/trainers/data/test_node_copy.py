"""Tests of the key `data: {stage: node}`: which process lists the files of a data set, and the progress that it reports while a
network disk is slow."""

import gc
import shutil
from pathlib import Path

import msgspec
import pytest
from support_cells import CELL
from support_datasets import imagenet_members, put
from support_golden import run_of

from shardlab.errors import InputError
from shardlab.runs.rundir import RunDir
from trainers.data import node_copy

OPTIONS = {"data": "imagenet", "subset": None, "subset_seed": 0}


@pytest.fixture
def staged(tmp_path, monkeypatch):
    """Returns (a run that reads a small ImageNet and copies it to the node, the folder of the run, the folder of the data)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    for name in ("node", "run"):
        (tmp_path / name).mkdir()
    put(tmp_path / "data" / "imagenet", imagenet_members())
    cell = msgspec.structs.replace(CELL, options=OPTIONS)
    run = msgspec.structs.replace(run_of("fork"), cell=cell, data_path=str(tmp_path / "data"), data_stage="node")
    return run, RunDir(tmp_path / "run"), tmp_path / "data"


def paths_in_memory(folder: Path) -> int:
    """Returns how many dicts in this process contain a path inside the folder as a value."""
    values = [list(table.values()) for table in gc.get_objects() if type(table) is dict]
    return sum(any(type(value) is type(folder) and value.is_relative_to(folder) for value in row) for row in values)


def test_only_the_rank_that_copies_lists_the_files_and_no_rank_keeps_them(staged):
    run, run_dir, data = staged
    with node_copy.stage_data(run, run_dir) as copy:
        train = [name for name in imagenet_members() if name.startswith("train")]
        assert all((copy / "imagenet" / name).is_file() for name in train)
        assert paths_in_memory(data / "imagenet") == 0
        shutil.rmtree(data)
        with node_copy.stage_data(run, run_dir) as second:
            assert second == copy
    (event,) = [event for event in run_dir.read_events() if event.event == "data_copied"]
    assert event.data["files"] == len(train) + 1  # the list of the files is a file of the copy too


def test_progress_is_reported_while_the_sizes_are_asked_for(staged, monkeypatch):
    monkeypatch.setattr(node_copy, "REPORT_S", 0.0)
    run, run_dir, _ = staged
    with node_copy.stage_data(run, run_dir):
        pass
    (copied,) = [event for event in run_dir.read_events() if event.event == "data_copied"]
    before = [event for event in run_dir.read_events() if event.event == "data_copying" and event.data["bytes"] == 0]
    assert len(before) == copied.data["files"]


def test_a_missing_data_set_is_a_sentence_and_leaves_no_folder(staged):
    run, run_dir, data = staged
    shutil.rmtree(data / "imagenet")
    with pytest.raises(InputError, match="imagenet: not found"), node_copy.stage_data(run, run_dir):
        pass
    assert not list((data.parent / "node").glob("shardlab-data-*/*"))


def test_all_files_of_several_batches_are_copied(staged, monkeypatch):
    monkeypatch.setattr(node_copy, "FILES_PER_BATCH", 2)
    run, run_dir, _ = staged
    with node_copy.stage_data(run, run_dir) as copy:
        assert len(list((copy / "imagenet").rglob("*.JPEG"))) == sum(name.startswith("train") for name in imagenet_members())
