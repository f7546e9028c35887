"""Runs that several processes read are those that one reads, also where the others fail."""

import os
import sys

import pytest
import support_collect as support

from collect import load, reading
from collect.load import LoadedRun


def every(workspace) -> list[LoadedRun]:
    return [run for cell in load.load(workspace, None).cells for run in (*cell.runs, *cell.earlier)]


@pytest.fixture
def workspace(tmp_path):
    found = support.matrix(tmp_path)
    damaged = found.all_runs()[0].steps_file(0)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    return found


@pytest.fixture
def answers(monkeypatch):
    """What was received of other processes, of which there are two."""
    found = []

    def received(*asked):
        found.append(receive(*asked))
        return found[-1]

    receive = reading._received
    monkeypatch.setattr(reading, "_received", received)
    monkeypatch.setattr(reading, "MANY", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    return found


def assert_same(one: LoadedRun, other: LoadedRun) -> None:
    for name in set(LoadedRun.__struct_fields__) - {"folder", "steps", "timed", "world", "samples"}:
        assert getattr(one, name) == getattr(other, name)
    frames = [(run.steps, run.timed, run.world, *run.samples) for run in (one, other)]
    for mine, theirs in zip(*frames, strict=True):
        assert mine.schema == theirs.schema
        assert mine.equals(theirs)


def test_several_processes_read_what_one_reads(workspace, answers, monkeypatch):
    together = every(workspace)
    assert len(answers) == 2
    assert 0 < sum(len(batch.records) for batch in answers) < len(together)
    monkeypatch.setattr(reading, "MANY", 1_000)
    alone = every(workspace)
    assert any(run.damage for run in alone)
    assert any(run.quantities for run in alone)
    assert any(run.coverage for run in alone)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_what_others_could_not_read_is_read_here(workspace, answers, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    found = every(workspace)
    assert not answers
    monkeypatch.setattr(reading, "MANY", 1_000)
    for one, other in zip(every(workspace), found, strict=True):
        assert_same(one, other)
