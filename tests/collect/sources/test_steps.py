"""Frames of steps: the loss of a step over all ranks."""

import pytest

from collect.sources.steps import RecordedSteps, build_step_frames
from shardlab.runs.record import StepRecord


def make_step(step, *, units, loss):
    return StepRecord(schema=1, step=step, t_s=step, wall_s=step, units=units, step_ms=10.0, loss=loss)


def test_the_loss_of_a_step_is_the_mean_over_the_ranks_that_have_one():
    steps = {
        0: [make_step(1, units=3, loss=2.0), make_step(2, units=3, loss=None), make_step(3, units=1, loss=4.0)],
        1: [make_step(1, units=1, loss=6.0), make_step(2, units=1, loss=None), make_step(3, units=9, loss=None)],
    }
    world = build_step_frames(RecordedSteps(steps, ranks=2, data_ranks=2)).world_steps
    assert world["loss"].to_list() == [pytest.approx(3.0), None, 4.0]
