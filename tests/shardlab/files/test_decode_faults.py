"""A damaged file that cannot be decoded: every reader of files reports it in one sentence, or treats it as absent."""

import pytest

from jobs.run_queue import RunQueue
from jobs.slurm import submission
from shardlab.errors import InputError
from shardlab.remote import remote_workspace
from shardlab.runs.run import read_run as read_run
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

CONTENTS = {
    "nested too deeply": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no UTF-8": b'{"x":"\xff","schema":"\xff","name":"\xff"}',
    "cut": b'{"schema":1,',
}


@pytest.fixture(params=CONTENTS.values(), ids=CONTENTS)
def damaged(request, tmp_path):
    """A function that takes a file name and writes a damaged file with this name."""

    def write(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(request.param)
        return path

    return write


def test_damaged_files_of_a_run_are_refused(damaged):
    with pytest.raises(InputError, match="is not a run of this version"):
        read_run(damaged("run.json"))
    with pytest.raises(InputError, match="is not a result of this version"):
        RunDir(damaged("result.json").parent).read_result()


@pytest.mark.parametrize("name", ["last-matrix.json", "matrices/one.json"])
def test_damaged_notes_on_a_matrix_are_refused(damaged, tmp_path, name):
    damaged(f".shardlab/{name}")
    with pytest.raises(InputError, match="the notes on the matrix cannot be read"):
        Workspace(tmp_path).read_expansion(None if name == "last-matrix.json" else "one")


def test_damaged_notes_on_a_submission_are_refused(damaged, tmp_path):
    damaged(".shardlab/submissions/x.json")
    assert submission.list_submissions(Workspace(tmp_path)) == []
    (said,) = submission.describe_damaged(Workspace(tmp_path))
    assert "is not a submission of this version" in said


def test_a_damaged_note_of_a_runner_is_refused(damaged, tmp_path):
    damaged(".shardlab/local/runner.json")
    assert not RunQueue("local", Workspace(tmp_path)).is_runner_alive()


def test_a_damaged_note_on_the_place_of_runs_is_refused(damaged, tmp_path):
    damaged(".shardlab/away.json")
    with pytest.raises(InputError, match="is not of this version"):
        remote_workspace.read_remote_workspace(Workspace(tmp_path))
