"""Faults on purpose in real runs: a slowed rank is the straggler that is found, and a lost worker ends a synchronous run."""

import signal

import pytest

from collect.loading.loaded_run import LoadedRun
from collect.timeline.timeline import find_straggler
from shardlab.matrix.cell import Instruments, Optimizer, Validation
from shardlab.matrix.faults import LostWorker, SlowedRank

pytest_plugins = ["support_trainers"]
KEYS = {"workload": "vgg16-tiny", "gpus": 2, "steps": 6}
CALM = Optimizer(name="sgd", lr=0.005, momentum=0.9)  # so small that updates with old parameters do not diverge
DELAY_MS = 300.0  # long beside a step of this model on a busy machine
SLOWED = Instruments(straggler=SlowedRank(rank=1, delay_ms=DELAY_MS))
LOST = Instruments(lost_worker=LostWorker(rank=1, step=4))


@pytest.mark.parametrize(("strategy", "more"), [("ddp", {}), ("fsdp2", {}), ("ps-async", {"servers": 1})])
def test_the_slowed_rank_is_the_straggler_that_is_found(bench, strategy, more):
    run_dir = bench.complete(strategy=strategy, instruments=SLOWED, warmup_steps=1, **KEYS, **more)
    run = LoadedRun.read(run_dir)
    found = find_straggler(run)
    assert (found.rank, found.phase) == (1, "data")
    delayed = [record.data_ms for record in run_dir.steps(1).records]
    assert len(delayed) == 7
    assert min(delayed) >= DELAY_MS  # also in the warm-up step


def ended(run_dir, code):
    run_dir.write_event("jobs", "started")
    run_dir.write_event("job", "exited", code=code)
    return run_dir.judge()


def test_a_synchronous_run_fails_and_its_reason_is_the_fault(bench):
    run_dir = bench.run_dir(strategy="ps-sync", servers=1, instruments=LOST, expect=["failed"], **KEYS)
    code, _ = bench.finish(run_dir)
    assert code == 128 + signal.SIGKILL
    state = ended(run_dir, code)
    assert (state.state, state.why) == ("failed", LOST.lost_worker.why)
    assert len(run_dir.steps(1).records) == 3
    assert LOST.lost_worker.why in run_dir.rank_log(1).read_text()


def test_an_asynchronous_run_goes_on_and_is_complete(bench):
    run_dir = bench.complete(strategy="ps-async", servers=1, instruments=LOST, **KEYS)
    result = run_dir.read_result()
    assert (result.state, result.knobs["effective"]["workers_lost"]) == ("completed", [1])
    assert [len(run_dir.steps(rank).records) for rank in range(2)] == [6, 3]
    state = ended(run_dir, 0)
    assert (state.state, state.why) == ("completed", LOST.lost_worker.why)


@pytest.mark.parametrize(("interval", "pulls"), [(1, 12), (4, 2), (8, 0)])
def test_a_pull_interval_changes_staleness_bytes_and_the_validated_parameters(bench, interval, pulls):
    """With an interval of 8, no worker pulls in 6 steps, so each trains on the first parameters. Nevertheless the validation
    sees what the servers learned."""
    validation = Instruments(validation=Validation(every_steps=6, items=40))
    options = {"pull_interval": interval}
    keys = {
        "gpus": 2,
        "steps": 6,
        "servers": 1,
        "instruments": validation,
        "options": options,
        "prove": "auto",
        "optimizer": CALM,
    }
    run_dir = bench.complete(strategy="ps-async", **keys)
    result, psi = run_dir.read_result(), 4 * 220_544
    known = result.knobs["effective"]
    assert (known["pull_interval"], known["pulls"], known["updates"]) == (interval, pulls, 12)
    assert known["largest_staleness"] >= min(interval, 6) - 1
    assert result.communication_bytes["theory"] == pytest.approx(2 * psi * (1 + 1 / interval))
    assert result.communication_bytes["counted"] == pytest.approx(psi * (12 + pulls) / 6)
    assert result.same_work.verdict == "not provable"
    assert (f"once in {interval} pushes" in result.same_work.why) == (interval > 1)
    losses = [record.loss for rank in range(2) for record in run_dir.steps(rank).records]
    if interval == 8:
        assert result.instruments["validation"]["loss"] < min(losses) - 0.05
