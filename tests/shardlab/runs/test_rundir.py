"""The class RunDir reads each file of a run only once, and reads no more of a file than necessary."""

import msgspec
import pytest
from support_cells import CELL

from shardlab.files import files
from shardlab.runs.record import Result, StepRecord
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir


@pytest.fixture
def ended(tmp_path):
    """Returns a function that makes a run of 10 steps on 2 ranks, which exited with code 0. counted: the number of steps that
    the supervisor counted when the run ended; recorded: the number of steps in the file of each rank."""

    def made(counted: int | None, *, recorded: int) -> RunDir:
        folder = RunDir(tmp_path / make_run_id(CELL, 1))
        folder.steps_file(0).parent.mkdir(parents=True)
        run = Run(
            schema=1, run_id=folder.run_id, matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=1, attempt=1,
            launcher="torchrun", rehearsal=False, world=World(1, 2, 2), cluster={}, data_path="", versions={},
            git_commit=None, templates={}, created="",
        )  # fmt: skip
        files.write_json(folder.run_json, run)
        result = Result(schema=1, run_id=run.run_id, state="completed", rehearsal=False, steps=10, unit="tokens")
        files.write_json(folder.result, result)
        steps = [StepRecord(schema=1, step=n, t_s=n, wall_s=n, units=1, step_ms=1) for n in range(1, recorded + 1)]
        for rank in range(CELL.gpus):
            folder.steps_file(rank).write_bytes(msgspec.json.Encoder().encode_lines(steps))
        folder.write_event("attempt", "started")
        folder.write_event("attempt", "exited", code=0, **({} if counted is None else {"steps": counted}))
        return folder

    return made


@pytest.mark.parametrize(("counted", "recorded"), [(10, 10), (None, 10), (9, 10), (10, 0)])
def test_steps_are_counted_again_if_the_supervisor_counted_too_few(ended, counted, recorded):
    """The supervisor may count too few steps if a shared file system did not show all records yet when the run ended. Then the
    records are counted again."""
    assert ended(counted, recorded=recorded).judge().state == "completed"


@pytest.mark.parametrize("counted", [None, 0, 9])
def test_a_run_that_lacks_steps_is_not_complete(ended, counted):
    verdict = ended(counted, recorded=9).judge()
    assert (verdict.state, verdict.why) == ("failed", "exit code 0, but 9 steps are recorded of 10")


@pytest.mark.parametrize("behind", [0, 1])
def test_a_run_is_complete_when_its_slowest_rank_is(ended, behind):
    folder = ended(None, recorded=10)
    lines = folder.steps_file(behind).read_bytes().splitlines(keepends=True)
    folder.steps_file(behind).write_bytes(b"".join(lines[:9]))
    assert folder.count_timed_steps(CELL.gpus) == 9
    assert folder.judge().why == "exit code 0, but 9 steps are recorded of 10"


def test_counted_steps_do_not_complete_a_run_without_its_result(ended):
    """The supervisor's count of steps does not make a run completed if its result is missing or damaged."""
    folder = ended(10, recorded=10)
    folder.result.unlink()
    assert folder.judge().state == "failed"
    folder.result.write_bytes(b"{")
    assert folder.judge().state == "unknown"


def test_a_missing_run_folder_has_no_events_and_an_unknown_state(tmp_path):
    nowhere = RunDir(tmp_path / "no")
    assert (nowhere.read_events(), nowhere.list_hosts(), nowhere.judge().state) == ([], [], "unknown")
