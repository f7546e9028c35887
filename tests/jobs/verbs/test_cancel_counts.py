"""`jobs cancel` counts the runs that it cancelled, and names the states of the others."""

from types import SimpleNamespace

import pytest

from jobs.verbs import status


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        (["cancelled", "cancelled"], "2 run(s) cancelled."),
        (["cancelled", "completed", "cancelled"], "2 run(s) cancelled. Not cancelled: 1 completed."),
        (["completed", "running"], "0 run(s) cancelled. Not cancelled: 1 completed, 1 running."),
    ],
)
def test_runs_that_ended_meanwhile_are_not_counted_as_cancelled(states, sentence):
    assert status._count_states([SimpleNamespace(state=state) for state in states]) == sentence
