"""What launchers write down and refuse before any rank is started."""

import os
import pickle

import pytest
from support_golden import run_of

from jobs.launchers import submitit
from shardlab.errors import InputError
from shardlab.rundir import RunDir


def test_submitits_pickle_holds_the_runs_path_and_nothing_else(tmp_path):
    (tmp_path / "log" / "submitit").mkdir(parents=True)
    (tmp_path / "log" / "submitit" / "1_submitted.pkl.save_tmp").touch()
    given = submitit.prepare(RunDir(tmp_path), run_of("submitit"))
    (pickled,) = (tmp_path / "log" / "submitit").iterdir()
    assert pickled.name == f"{given['SUBMITIT_LOCAL_JOB_ID']}_submitted.pkl" == f"{os.getpid()}_submitted.pkl"
    found = pickle.loads(pickled.read_bytes())
    assert vars(found.function) == {"folder": str(tmp_path)}
    assert (found.args, found.kwargs, found.done()) == ((), {}, False)


@pytest.mark.parametrize("name", ["50%total", "100%A"])
def test_a_path_that_submitit_would_change_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="submitit puts a job's numbers for %j, %t, %a, %A"):
        submitit.prepare(RunDir(tmp_path / name), run_of("submitit"))
    assert not list((tmp_path / name).iterdir())
