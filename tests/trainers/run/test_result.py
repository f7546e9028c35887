"""Every figure in result.json can be derived from the records of the ranks."""

import json
import math
import socket

import numpy as np
import pytest

from shardlab.matrix.cell import Instruments, Optimizer, Schedule, Validation
from trainers.instruments.timing import BACKWARD, DATA, FORWARD, HostClock

pytest_plugins = ["support_trainers"]


@pytest.fixture(scope="module")
def run(bench):
    """A run on two ranks that trains two warm-up steps and then two epochs of three steps each. The data set has 2,000
    images."""
    return bench.complete(
        workload="vit-tiny", strategy="ddp", gpus=2, accumulation=2, global_batch_size=600, epochs=2, steps=None,
        warmup_steps=2, options={"n_layer": 1, "n_embd": 8, "n_head": 1, "bucket_cap_mb": 3},
        schedule=Schedule("linear", 3), optimizer=Optimizer(name="adamw", lr=0.01, weight_decay=0.1),
    )  # fmt: skip


def test_every_figure_follows_from_the_step_records(run):
    result = run.read_result()
    ranks = [[r for r in run.steps(rank).records if not r.warmup] for rank in (0, 1)]
    slowest = np.max([[r.step_ms for r in records] for records in ranks], axis=0)
    assert (result.state, result.steps, result.unit, result.run_id) == ("completed", 6, "images", run.run_id)
    assert result.final_loss == pytest.approx((ranks[0][-1].loss + ranks[1][-1].loss) / 2)
    assert result.throughput_per_s == pytest.approx(6 * 600 / (slowest.sum() / 1000))
    spread = result.step_time_ms
    assert (spread.mean, spread.median, spread.n) == (pytest.approx(slowest.mean()), pytest.approx(np.median(slowest)), 6)
    assert (spread.p5, spread.p95) == tuple(pytest.approx(np.percentile(slowest, p)) for p in (5, 95))
    assert result.epoch_time_s == [pytest.approx(slowest[part].sum() / 1000) for part in (slice(3), slice(3, 6))]
    assert result.train_time_s * 1000 >= max(sum(r.step_ms for r in records) for records in ranks)
    everything = [r for rank in (0, 1) for r in run.steps(rank).records]
    assert result.peak_memory_bytes == {"rss": max(r.rss_bytes for r in everything)}


def test_step_records_count_warm_up_apart_and_their_parts_add_up(run):
    for rank in (0, 1):
        records = run.steps(rank).records
        assert [(r.step, r.warmup) for r in records] == [(1, True), (2, True)] + [(step, False) for step in range(1, 7)]
        assert {r.units for r in records} == {300}
        assert [r.t_s for r in records] == sorted(r.t_s for r in records)
        for r in records:
            parts = (r.data_ms, r.forward_ms, r.backward_ms, r.optimizer_ms)
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(r.step_ms)
            assert r.allocated_bytes is None  # without a GPU, the record has no GPU memory
    assert run.count_timed_steps(2) == 6


def test_each_rank_counts_its_own_processor_time_and_storage(run):
    for rank in (0, 1):
        records = run.steps(rank).records
        cpu_s = [r.cpu_s for r in records]
        assert cpu_s == sorted(cpu_s)
        assert 0 < cpu_s[0] < cpu_s[-1]
        assert all(r.disk_read_bytes >= 0 and r.disk_write_bytes >= 0 for r in records)
        written = [r.disk_write_bytes for r in records]
        assert written == sorted(written)


def test_knobs_are_read_from_what_was_built(run):
    """The key `knobs.effective` has values of the built DDP model and optimizer."""
    knobs = run.read_result().knobs
    assert knobs["asked"]["bucket_cap_mb"] == 3
    effective = knobs["effective"]
    assert effective["bucket_cap_mb"] == 3.0
    assert sum(effective["bucket_sizes_bytes"]) == run.read_result().parameters * 4
    assert (effective["optimizer"], effective["weight_decay"]) == ("AdamW", 0.1)
    # The learning rate is that of step 7 of 8, where warm-up steps count.
    assert effective["last_lr"] == pytest.approx(0.01 * (1 - (7 - 3) / (8 - 3)))
    assert effective["tf32"] == "no effect on a CPU"


@pytest.mark.parametrize(("strategy", "kept"), [("fsdp2", True), ("fsdp2-zero2", False)])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_fsdp2_reports_the_sharding_and_dtypes_in_effect(bench, strategy, kept, precision):
    result = bench.complete(strategy=strategy, gpus=2, steps=1, precision=precision).read_result()
    effective = result.knobs["effective"]
    assert effective["reshard_after_forward"] is kept
    assert effective["sharded_groups"] == 5  # one group for each of the four blocks, and one for all other parameters
    assert effective["shard_parameters"] == result.parameters / 2
    assert effective["parameters_gathered_as"] == ("bfloat16" if precision == "bf16" else "float32")
    assert effective["output_dtype"] == effective["parameters_gathered_as"]
    assert effective["gradients_reduced_as"] == effective["weights_dtype"] == effective["optimizer_state_dtype"] == "float32"


def test_the_host_is_described_beside_the_result(run):
    environment = json.loads(run.environment_file(socket.gethostname()).read_text())
    assert environment["torch"] | {"version": ""} == {
        "version": "", "cuda": None, "device": "cpu", "backend": "gloo", "nccl": None, "threads": 1,
    }  # fmt: skip
    assert environment["packages"]["torch"] == environment["torch"]["version"] == run.read_result().versions["torch"]


@pytest.mark.parametrize("workload", ["gpt2-tiny", "vit-tiny"])
def test_the_loss_of_a_tiny_workload_falls_by_a_quarter(bench, workload):
    """The loss of a tiny workload starts at that of random guesses and falls by a quarter in 40 steps."""
    run = bench.complete(workload=workload, steps=40, global_batch_size=32, optimizer=Optimizer(name="adamw", lr=1e-3))
    first = next(iter(run.steps(0).records)).loss
    assert first == pytest.approx(math.log(256 if workload == "gpt2-tiny" else 10), rel=0.1)
    assert run.read_result().final_loss < 0.75 * first


def test_repeated_parts_of_a_step_are_summed(monkeypatch):
    instants = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(instants))
    clock = HostClock()
    clock.start()
    for part in (DATA, FORWARD, BACKWARD, FORWARD, BACKWARD):
        clock.mark(part)
    monkeypatch.undo()
    assert clock.stop().read_parts_ms() == {"data": 1000.0, "forward": 6000.0, "backward": 8000.0, "optimizer": 0.0}


# A program that trains with an engine whose method `finish` sets all parameters to zero. It prints the names of the engine's
# methods in the order of their calls.
FINISHING = """
import json, sys
from pathlib import Path
import torch
from shardlab.runs.rundir import RunDir
from trainers.run import loop
from trainers.engines.single import SingleEngine
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks

calls, effective = [], SingleEngine.effective

def finish(self):
    with torch.no_grad():
        for parameter in self.model.parameters():
            parameter.zero_()

SingleEngine.finish = finish
SingleEngine.effective = lambda self: {**effective(self), "largest": max(float(p.abs().max()) for p in self.model.parameters())}
for name in ("update", "finish", "evaluate", "effective", "close"):
    def called(self, *given, name=name, real=getattr(SingleEngine, name)):
        if calls[-1:] != [name]:
            calls.append(name)
        return real(self, *given)
    setattr(SingleEngine, name, called)
run_dir = RunDir(Path(sys.argv[1]))
ranks = Ranks(Rank())
loop.train(run_dir.read_run(), run_dir, ranks)
ranks.leave_group()
print(json.dumps(calls))
"""


def test_an_engine_finishes_in_the_last_step_before_its_parameters_are_read(bench):
    instruments = Instruments(validation=Validation(every_steps=4, items=8))
    run_dir = bench.run_dir(steps=4, warmup_steps=2, instruments=instruments)
    made = bench.scripts.run(FINISHING, str(run_dir.path))
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == ["update", "finish", "evaluate", "effective", "close"]
    assert run_dir.read_result().knobs["effective"]["largest"] == 0.0
    records = [json.loads(line) for line in run_dir.validation_file.read_text().splitlines()]
    # If all parameters are zero, the model predicts all 256 tokens with equal probability.
    assert records[-1]["loss"] == pytest.approx(math.log(256), rel=1e-3)
