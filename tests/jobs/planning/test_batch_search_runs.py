"""A search for a batch size: one process runs all tries, and an interrupted search continues with the next try."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import support_search_ranks
from support_e2e import HANG_S
from support_search import MATRIX, SearchedWorkspace

from jobs import run_queue
from jobs.planning import plan
from jobs.rendering import frozen_source, render
from jobs.status import reconcile
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.hardware import host
from shardlab.runs import prediction
from shardlab.workspace.workspace import Workspace

ENDED = "the largest that fits is 2"
STATES = {"1": "completed", "2": "completed", "4": "oom", "3": "oom"}


def events(folder, name):
    return [event for event in folder.read_events() if event.event == name]


@pytest.fixture
def searched(tmp_path):
    return SearchedWorkspace(tmp_path)


def test_all_tries_are_runs_of_one_process_and_submit_continues_them(tmp_path):
    searched = SearchedWorkspace(tmp_path, limit=5)
    path, states = [1, 2, 4, 8, 6, 5], ["completed", "completed", "completed", "oom", "oom", "completed"]
    assert "starts at 1 (the planner predicts nothing), up to 8, at most 6 tries" in searched.jobs("plan")
    assert "the largest that fits is 5" in searched.jobs("submit", "--wait")
    assert searched.sizes() == path
    assert list(searched.states().values()) == states
    folders = searched.folders()
    assert len({(event.data["pid"], event.data["created"]) for folder in folders for event in events(folder, "started")}) == 1
    assert [len(events(folder, "started")) for folder in folders] == [1] * len(path)
    assert len({folder.read_run().search for folder in folders}) == 1
    needed = [prediction.read_prediction(folder.path).tensor_bytes.likely for folder in folders]
    assert sorted(needed, key=lambda size: path[needed.index(size)]) == sorted(needed)
    (found,) = json.loads(searched.jobs("status", "--json", "--matrix", "m"))["searches"]
    assert (found["best"], found["has_ended"], found["search"]["most_tries"]) == (5, True, 6)
    assert [(one["size"], one["state"]) for one in found["tries"]] == list(zip(path, states, strict=True))
    assert "its search has ended: the largest that fits is 5" in searched.jobs("submit")
    assert searched.sizes() == path
    shutil.rmtree(folders[-1].path)  # now the workspace is as if the process of the search had been killed before its last try
    goes_on = "its search goes on after 1 completed, 2 completed, 4 completed, 8 oom, 6 oom, next 5"
    assert goes_on in searched.jobs("submit", "--wait")
    assert list(searched.states().values()) == states


def test_a_rank_that_runs_out_of_memory_ends_its_try_and_not_the_search(tmp_path):
    matrix = MATRIX.replace("GOAL", "largest_that_fits").replace("at_most: 8", "at_most: 2")
    (tmp_path / "m.yaml").write_text(matrix.replace("seq_len: 16", "seq_len: 512, memory_limit_gib: 0.027"))
    command = [sys.executable, "-m", "jobs", "submit", "--wait", "--json", f"--matrix={tmp_path}/m.yaml"]
    done = subprocess.run([*command, f"--workspace={tmp_path}"], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    states = {folder.read_run().cell.micro_batch_size: folder.judge().state for folder in Workspace(tmp_path).list_run_dirs()}
    assert states == {1: "completed", 2: "oom"}


def test_the_fastest_is_searched_by_the_throughput_of_the_tries(tmp_path):
    searched = SearchedWorkspace(tmp_path, goal="fastest", limit=5)
    assert "the fastest is 3" in searched.jobs("submit", "--wait")
    assert searched.sizes() == [1, 2, 4, 3]


def test_each_repeat_is_a_search_of_its_own_and_ends_if_nothing_fits(tmp_path):
    searched = SearchedWorkspace(tmp_path, limit=0)
    assert searched.jobs("submit", "--wait", "--repeats", "2").count("no size fits, not even 1") == 2
    assert sorted((run.repeat, run.cell.micro_batch_size) for run in (folder.read_run() for folder in searched.folders())) == [
        (1, 1),
        (2, 1),
    ]


def test_a_search_whose_supervisor_was_killed_continues_with_a_retry(searched):
    held = searched.flag("holds-2")
    searched.jobs("submit")
    (started,) = events(searched.when_started(2), "started")
    os.kill(started.data["pid"], signal.SIGKILL)
    held.unlink()
    searched.jobs("submit", "--wait", code=1)
    assert searched.states() == {"1": "completed", "2": "failed"}
    assert ENDED in searched.jobs("retry", "--wait")
    assert searched.states() == {**STATES, "2": "failed", "2-a2": "completed"}


def test_a_search_killed_between_two_tries_continues_with_a_retry(searched):
    searched.flag("dies-2")
    searched.jobs("submit", "--wait", code=1)
    assert searched.states() == {"1": "completed", "2": "failed"}
    assert ENDED in searched.jobs("retry", "--wait")
    assert searched.states() == {**STATES, "2": "failed", "2-a2": "completed"}


def test_a_cancelled_search_starts_no_further_try(searched):
    held = searched.flag("holds-2")
    searched.jobs("submit")
    searched.when_started(2)
    searched.jobs("cancel", "--all")
    held.unlink()
    assert searched.states() == {"1": "completed", "2": "cancelled"}
    searched.jobs("retry", "--only", "cancelled", "--wait")
    assert searched.states() == {**STATES, "2": "cancelled", "2-a2": "completed"}


def test_a_search_cancelled_right_after_a_try_starts_no_further_try(searched):
    planned = plan.plan_matrix(searched.workspace, str(searched.matrix), THIS_MACHINE, where=None, repeats=None)
    frozen_source.freeze_source(Path(planned.context.source))
    folder = render.write_run_folder(
        render.make_run(planned.cells[0], 1, 1, planned.context), searched.workspace.runs, planned.context
    )
    folder.write_event("attempt", "started", search=True, **host.identify_this_process())
    support_search_ranks.main(folder, 1)
    folder.write_event("attempt", "exited", code=0, steps=1)
    run_queue.QueueScheduler().cancel(searched.workspace, [reconcile.read_run_on_disk(folder)])
    words = [sys.executable, "-m", "jobs.supervisor.next_try", str(folder.path), "0"]
    assert subprocess.run(words, check=False).returncode == 0
    assert searched.states() == {"1": "completed"}
