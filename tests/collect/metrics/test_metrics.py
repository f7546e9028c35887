"""Every metric has the value that was computed by hand. Changes that must not matter, such as another order of records, keep
this value.
"""

import json
import math
from statistics import fmean, median

import msgspec
import polars as pl
import pytest
import support_collect as support
from hypothesis import given, settings
from hypothesis import strategies as st
from support_long import LONG

from collect import summary
from collect.cli import main
from collect.drawing.traces import thin_points
from collect.findings import statistics
from collect.loading import telemetry
from collect.loading.loaded_run import Quantity
from collect.metric import MeanPair, load_metrics
from collect.metrics import (
    bubble,
    checkpoints,
    collective_passes,
    energy,
    memory,
    memory_categories,
    mfu,
    network,
    scaling,
    staleness,
    throughput,
    trace_shares,
    utilization,
    wire,
)
from collect.metrics.accuracy import compute_time_to_accuracy
from collect.metrics.loss import read_final_loss
from collect.metrics.step_time import compute_step_percentile
from collect.metrics.training_time import average_epoch_times
from collect.reading import load
from collect.sources import steps
from collect.traces.breakdown import Breakdown, EventTally
from shardlab.hardware.host import Gpu, Host
from shardlab.matrix.command import Command
from shardlab.runs.record import GpuSample, NicSample, Result, Sample, StepRecord, ValidationRecord
from shardlab.terminal import notation
from shardlab.workspace.workspace import Workspace

OF_RUN = {metric.name: metric.of_run for metric in load_metrics()}
RESULT = Result(schema=1, run_id="r", state="completed", rehearsal=True, steps=2, unit="tokens")


def step(number, ms, *, loss=1.0, units=8, warmup=False, wall_s=None, **more):
    wall = float(number if wall_s is None else wall_s)
    return StepRecord(schema=1, step=number, t_s=wall, wall_s=wall, loss=loss, units=units, step_ms=ms, warmup=warmup, **more)


def sample(wall_s, *, host="a", boot="1", nics=(), gpus=None, **more):
    return Sample(schema=1, t_s=wall_s, wall_s=wall_s, host=host, boot_id=boot, nics=list(nics) or None, gpus=gpus, **more)


def nic(tx_bytes, name="eth0", kind="physical", mac=None, pci=None):
    return NicSample(name=name, kind=kind, tx_bytes=tx_bytes, mac=mac, pci=pci)


def measured(ranks, telemetry_of=(), gpus=None, *, result=RESULT, hosts_of=(), validation=(), **keys):
    hosts = {}
    for entry in telemetry_of:
        hosts.setdefault(entry.host, []).append(entry)
    world = gpus or max(len(ranks), 1)
    cell = msgspec.structs.replace(support.cell("ddp", world), **keys)
    run = support.loaded(cell, sample_records=hosts, result=result, hosts=list(hosts_of), validation=list(validation))
    run.step_frames = steps.build_step_frames(steps.RecordedSteps(ranks, world, world))
    return run


TWO_RANKS = {
    0: [step(1, 900.0, warmup=True), step(1, 100.0, loss=4.0, units=8), step(2, 300.0, loss=3.0, units=8)],
    1: [step(1, 800.0, warmup=True), step(1, 200.0, loss=2.0, units=24), step(2, 250.0, loss=1.0, units=8)],
}


def test_throughput_is_all_units_over_the_slowest_ranks_time():
    found = throughput.measure_throughput(measured(TWO_RANKS))  # 48 units in 500 ms, without the warm-up step
    assert (found.value, found.unit) == (pytest.approx(96.0), "tokens/s")


def host_with(*names):
    return Host(
        schema=1, host="a", boot_id="1", kernel="", system="", cpu_model=None, cpus=1, cpus_allowed=1, memory_bytes=1, nics=[],
        python="", packages={}, gpus=[Gpu(uuid=str(number), name=name) for number, name in enumerate(names)],
    )  # fmt: skip


def test_mfu_is_the_share_of_the_gpus_peak_that_the_model_needs():
    # 96 tokens/s of 1 TFLOP each, on two A100 with a peak of 312 TFLOP/s each.
    counted = msgspec.structs.replace(RESULT, flops_per_unit=1e12)
    a100 = host_with("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB")
    found = mfu.compute_mfu(measured(TWO_RANKS, result=counted, hosts_of=[a100], precision="bf16"))
    assert (found.value, found.unit) == (pytest.approx(100 * 96 / 624), "%")
    assert mfu.compute_mfu(measured(TWO_RANKS, result=counted, hosts_of=[a100], precision="fp32")).value == pytest.approx(
        100 * 96 / 39
    )


@pytest.mark.parametrize("names", [(), ("NVIDIA Unheard-of 9000",), ("NVIDIA A100-SXM4-40GB", "NVIDIA H200")])
def test_mfu_is_blank_where_the_peak_is_not_known(names):
    counted = msgspec.structs.replace(RESULT, flops_per_unit=1e12)
    assert mfu.compute_mfu(measured(TWO_RANKS, result=counted, hosts_of=[host_with(*names)])) is None
    assert mfu.compute_mfu(measured(TWO_RANKS, hosts_of=[host_with("NVIDIA H200")])) is None  # RESULT has no FLOPs per unit


def test_a_watched_step_counts_for_its_loss_and_for_no_time():
    """A step that an instrument observed counts for the loss, but not for throughput and step time."""
    ranks = {0: [step(1, 100.0), step(2, 9000.0, watched=True, loss=3.0)]}
    assert throughput.measure_throughput(measured(ranks)).value == pytest.approx(80.0)
    assert compute_step_percentile(measured(ranks), 0.95).value == pytest.approx(100.0)
    assert read_final_loss(measured(ranks)).value == 3.0


def test_the_loss_of_a_command_is_the_last_that_it_told_and_has_no_unit():
    ranks = {0: [step(1, 100.0, loss=3.0), step(2, 100.0, loss=None)]}
    assert read_final_loss(measured(ranks)) is None
    run = measured(ranks, command=Command(words=["python"]))
    assert read_final_loss(run) == Quantity(3.0, "")


def test_accuracy_is_that_of_the_result_in_percent():
    assert OF_RUN["final_accuracy_pct"](measured(TWO_RANKS)) is None
    found = OF_RUN["final_accuracy_pct"](found_in(final_accuracy=0.75))
    assert (found.value, found.unit) == (75.0, "%")


def found_in(**result):
    return measured(TWO_RANKS, result=msgspec.structs.replace(RESULT, **result))


def test_time_to_an_accuracy_is_that_of_the_first_validation_that_has_it():
    seen = [ValidationRecord(schema=1, step=n, t_s=0, wall_s=0, loss=1, accuracy=a, items=8) for n, a in ((2, 0.9), (1, 0.5))]
    found = {pct: compute_time_to_accuracy(measured(TWO_RANKS, validation=seen), pct) for pct in (50, 50.1, 90, 90.1)}
    assert found[50] == Quantity(0.2, "s")  # step 1 took 200 ms on its slowest rank, step 2 300 ms
    assert found[50.1].value == found[90].value == pytest.approx(0.5)
    assert found[90.1] is None
    assert compute_time_to_accuracy(measured(TWO_RANKS), 0) is None


def test_times_of_training_and_epochs_are_the_results():
    assert OF_RUN["train_time_s"](found_in(train_time_s=58.3)) == Quantity(58.3, "s")
    assert OF_RUN["train_time_s"](measured(TWO_RANKS)) is None
    epochs = found_in(epoch_time_s=[9.0, 1.0, 2.0])
    assert (average_epoch_times(epochs, fmean).value, average_epoch_times(epochs, median).value) == (4, 2)
    assert average_epoch_times(measured(TWO_RANKS), max) is None
    assert OF_RUN["parameters"](found_in(parameters=124_439_808)) == Quantity(124_439_808, "parameters")


def test_memory_by_category_is_each_ones_own_largest():
    """The metric of a category is the largest memory of this category, even if the peak of the sum is at another time."""
    looked = {
        "peak_bytes": {"parameter": 400, "activation": 900, "unknown": 100},
        "largest_bytes": {"parameter": 400, "gradient": 400, "activation": 1000},
        "estimate_bytes": {"parameter": 400, "gradient": 400, "optimizer_state": 200},
    }
    found = found_in(instruments={"memory": looked})
    assert OF_RUN["memory_activation_bytes"](found) == Quantity(1000, "bytes")
    assert OF_RUN["memory_gradient_bytes"](found) == Quantity(400, "bytes")
    assert OF_RUN["memory_buffer_bytes"](found) is None
    assert memory_categories.sum_estimated_memory(found) == Quantity(1000, "bytes")
    assert memory_categories.compute_peak_over_estimate(found) == Quantity(1.4, "x")
    assert (
        memory_categories.compute_peak_over_estimate(found_in(instruments={"memory": looked | {"estimate_bytes": None}}))
        is None
    )
    assert memory_categories.sum_estimated_memory(measured(TWO_RANKS)) is None


def test_memory_of_weights_is_the_shard_the_gathered_and_the_copy_together():
    largest = {"parameter": 50, "gathered": 100, "master_parameter": 50, "gradient": 7}
    assert OF_RUN["memory_weight_bytes"](found_in(instruments={"memory": {"largest_bytes": largest}})) == Quantity(200, "bytes")
    del largest["gathered"]
    assert OF_RUN["memory_weight_bytes"](found_in(instruments={"memory": {"largest_bytes": largest}})) is None


def test_categories_are_those_of_the_instrument():
    from trainers.instruments.memory_timeline import CATEGORIES

    assert list(memory_categories.DESCRIPTION_BY_CATEGORY) == list(CATEGORIES)


def test_reserved_memory_is_the_allocators_own():
    gpu = {0: [step(1, 1.0, reserved_bytes=50), step(2, 1.0, reserved_bytes=40)], 1: [step(1, 1.0, reserved_bytes=60)]}
    assert memory.measure_reserved_memory(measured(gpu, gpus=1)) == Quantity(50, "bytes")
    assert memory.measure_reserved_memory(measured({0: [step(1, 1.0)]})) is None


def power(wall_s, *watts):
    return sample(wall_s, gpus=[GpuSample(uuid=str(number), power_w=one) for number, one in enumerate(watts)])


def test_energy_is_the_trapezoid_integral_of_power_samples():
    seen = [power(5, 0.0), power(10, 100.0), power(15, 200.0), power(25, 400.0)]
    found = energy.measure_energy(measured(WINDOW, seen))  # 750 J from 10 s to 15 s, and 1250 J from 15 s to 20 s
    assert (found.value, found.unit) == (pytest.approx(2000), "J")
    two = [power(t, 100.0, 50.0) for t in (9, 12, 15, 18, 21)]
    assert energy.measure_energy(measured(WINDOW, two)).value == pytest.approx(1500)
    each = energy.measure_energy_per_unit(measured(WINDOW, two))  # step 2, the only timed step, has 8 tokens
    assert (each.value, each.unit) == (pytest.approx(1500 / 8), "J/token")


def counter(wall_s, *joules, watts=5.0):
    """A telemetry sample of GPUs with an energy counter.

    joules: the value of the energy counter of each GPU. watts: the power of every GPU.
    """
    gpus = [GpuSample(uuid=str(number), energy_j=one, power_w=watts) for number, one in enumerate(joules)]
    return sample(wall_s, gpus=gpus)


def test_energy_is_the_growth_of_the_counters():
    seen = [counter(9, 1000.0, 0.0), counter(12, 1300.0, 3.0), counter(18, 2500.0, 9.0), counter(21, 2800.0, 12.0)]
    found = energy.measure_energy(measured(WINDOW, seen))  # GPU 0 used 2700 - 1100 J, GPU 1 used 11 - 1 J
    assert (found.value, found.kind) == (pytest.approx(1610), "counter")


def test_energy_is_computed_from_power_if_its_counter_is_incomplete_or_reset():
    """If the energy counter does not cover all timed steps or was reset, the energy is computed from power samples."""
    short = [counter(t, 100.0 * t) for t in (9, 12, 15, 18)]
    anew = [counter(t, value) for t, value in ((9, 900.0), (12, 1200.0), (15, 10.0), (18, 310.0), (21, 610.0))]
    one_without = [counter(t, 100.0 * t, None) for t in (9, 12, 15, 18, 21)]
    for seen, watts in ((short, 5.0), (anew, 5.0), (one_without, 10.0)):
        found = energy.measure_energy(measured(WINDOW, seen))
        assert (found.value, found.kind) == (pytest.approx(10 * watts), "power samples")


@pytest.mark.parametrize(
    "seen",
    [[], [sample(12)], [power(12, None), power(14, None)], [power(9, 100.0, None), power(21, 100.0, None)], [power(12, 90.0)],
     [power(t, 90.0) for t in (10, 11, 12, 13)]],
    ids=["none", "no GPU", "no power", "one GPU without", "one sample", "a third covered"],
)  # fmt: skip
def test_energy_is_blank_where_power_was_not_watched(seen):
    assert energy.measure_energy(measured(WINDOW, seen)) is None
    assert energy.measure_energy_per_unit(measured(WINDOW, seen)) is None


def test_gpu_memory_is_the_highest_share_of_any_gpu():
    hosts = [msgspec.structs.replace(host_with("A"), gpus=[Gpu(uuid="0", name="A", memory_bytes=100)])]
    seen = [
        sample(t, gpus=[GpuSample(uuid="0", memory_used_bytes=used)]) for t, used in ((5, 99), (12, 40), (15, 45), (21, 90))
    ]
    assert utilization.find_peak_gpu_memory(measured(WINDOW, seen, hosts_of=hosts)) == Quantity(45, "%")
    assert utilization.find_peak_gpu_memory(measured(WINDOW, seen)) is None


def test_the_size_of_a_gpu_comes_from_its_host_or_else_from_the_samples():
    hosts = [msgspec.structs.replace(host_with("A"), gpus=[Gpu(uuid="0", name="A", memory_bytes=100)])]
    first = sample(5, started_hz=2.0, gpus=[GpuSample(uuid="0", memory_used_bytes=80, memory_total_bytes=90)])
    seen = [first, sample(12, gpus=[GpuSample(uuid="0", memory_used_bytes=45)])]
    assert utilization.find_peak_gpu_memory(measured(WINDOW, seen, hosts_of=hosts)) == Quantity(45, "%")
    assert utilization.find_peak_gpu_memory(measured(WINDOW, seen)) == Quantity(50, "%")


def test_checkpoints_have_the_times_and_the_size_that_their_instrument_reports():
    found = found_in(instruments={"checkpoints": {"save_s": 1.5, "load_s": 0.5, "bytes": 70, "saves": 2, "cost_s": 4}})
    values = {metric.name: metric.of_run(found) for metric in checkpoints.METRICS}
    assert values == {
        "checkpoint_save_s": Quantity(1.5, "s"),
        "checkpoint_load_s": Quantity(0.5, "s"),
        "checkpoint_bytes": Quantity(70, "bytes"),
    }
    never_loaded = found_in(instruments={"checkpoints": {"saves": 0}})
    assert {metric.of_run(never_loaded) for metric in checkpoints.METRICS} == {None}


def test_staleness_is_of_all_pushes():
    """The mean and the largest staleness are over all pushes: staleness_counts maps a staleness to a number of pushes."""
    found = found_in(knobs={"effective": {"staleness_counts": {"0": 1, "1": 2, "3": 1}}})
    assert (staleness.compute_mean_staleness(found), staleness.find_largest_staleness(found)) == (
        Quantity(1.25, "updates"),
        Quantity(3, "updates"),
    )
    assert staleness.compute_mean_staleness(measured(TWO_RANKS)) is None
    assert staleness.find_largest_staleness(found_in(knobs={"effective": {"staleness_counts": {}}})) is None


def piped(first, last, **more):
    """A run of one step on a pipeline of two stages. first, last: (forward_ms, backward_ms) of the first and the last stage."""
    ranks = {
        rank: [step(1, sum(passes), forward_ms=passes[0], backward_ms=passes[1])] for rank, passes in enumerate((first, last))
    }
    return measured(ranks, pp=2, dp=1, gradient_accumulation_steps=4, **more)


def test_a_bubble_is_the_time_of_passes_beyond_the_compute_of_stages():
    # With 4 micro-batches, 10 ms for forward and 20 ms for backward on each of 2 stages, a step takes (4 + 1) x 30 ms, of which
    # each stage computes 120 ms. The bubble is the rest: 20 %.
    found = piped((40.0, 110.0), (50.0, 100.0))
    assert bubble.compute_measured_bubble(piped((40.0, 110.0), (70.0, 80.0))).value == pytest.approx(20)
    assert bubble.compute_theoretical_bubble(found) == Quantity(20, "%")
    assert bubble.compute_measured_bubble(piped((40.0, 110.0), (0.0, 150.0))) is None  # None: the stages differ too much
    assert bubble.compute_measured_bubble(piped((40.0, 110.0), (70.0, 80.0), options={"stages_per_rank": 2})) is None
    assert bubble.compute_theoretical_bubble(
        piped((1.0, 1.0), (1.0, 1.0), options={"stages_per_rank": 2})
    ).value == pytest.approx(100 / 9)
    assert bubble.compute_theoretical_bubble(measured(TWO_RANKS)) is bubble.compute_measured_bubble(measured(TWO_RANKS)) is None


@pytest.mark.parametrize(("stages", "passes", "pct"), [(2, 4, 20.0), (4, 4, 42.9), (4, 16, 15.8), (8, 32, 17.9), (8, 64, 9.9)])
def test_bubbles_by_theory_are_those_that_study_4_simulates(stages, passes, pct):
    ranks = {rank: [step(1, 1.0)] for rank in range(stages)}
    found = bubble.compute_theoretical_bubble(measured(ranks, pp=stages, dp=1, gradient_accumulation_steps=passes))
    assert found.value == pytest.approx(pct, abs=0.05)


@pytest.mark.parametrize(("stages", "passes", "time", "ideal", "rate"), [(2, 4, 15, 12, 0.267), (8, 64, 213, 192, 0.300)])
def test_times_by_theory_are_those_that_study_4_simulates(stages, passes, time, ideal, rate):
    ranks = {rank: [step(1, 1.0)] for rank in range(stages)}
    found = measured(ranks, pp=stages, dp=1, gradient_accumulation_steps=passes)
    assert bubble.compute_theoretical_time(found) == Quantity(time, "")
    assert bubble.compute_ideal_time(found) == Quantity(ideal, "")
    assert bubble.compute_theoretical_throughput(found).value == pytest.approx(rate, abs=0.0005)
    interleaved = measured(ranks, pp=stages, dp=1, gradient_accumulation_steps=passes, options={"stages_per_rank": 2})
    assert bubble.compute_theoretical_time(interleaved).value == pytest.approx(
        (time + ideal) / 2
    )  # two stages per rank halve the bubble
    alone = measured(TWO_RANKS)
    assert (
        bubble.compute_theoretical_time(alone)
        is bubble.compute_ideal_time(alone)
        is bubble.compute_theoretical_throughput(alone)
        is None
    )


def test_shares_of_a_trace_are_of_its_span_and_collectives_of_a_step():
    times = {"compute_ns": 60, "communication_ns": 30, "memory_ns": 0, "non_compute_ns": 20, "idle_ns": 20, "overlap_ns": 10}
    tallies = [EventTally("all_reduce", 6, 8_000_000), EventTally("broadcast", 2, 4_000_000)]
    one = Breakdown(rank=0, source="gpu", steps=2, span_ns=100, collectives=tallies, kernels=[], **times)
    other = msgspec.structs.replace(one, rank=1, span_ns=200, collectives=[])
    found = measured(TWO_RANKS).with_breakdowns([one, other])
    by_name = {metric.name: metric.of_run(found) for metric in trace_shares.METRICS}
    assert {name: quantity.value for name, quantity in by_name.items()} == {
        "compute_pct": 45, "communication_pct": 22.5, "non_compute_pct": 15, "idle_pct": 15,
        "collective_count": 2, "collective_ms": 3, "collective_mean_ms": 1.5,
    }  # fmt: skip
    alone = measured(TWO_RANKS).with_breakdowns([other])
    assert trace_shares.compute_mean_collective_ms(alone) is None
    assert {metric.of_run(measured(TWO_RANKS)) for metric in trace_shares.METRICS} == {None}


@pytest.mark.parametrize(("sync", "passes", "count", "ms"), [("last_pass", 4, 74, 10), ("every_pass", 4, 18.5, 2.5)])
def test_collectives_of_one_kind_are_counted_in_a_pass_that_reduces_gradients(sync, passes, count, ms):
    tallies = [EventTally("all_gather", 148, 20_000_000), EventTally("reduce_scatter", 6, 4_000_000)]
    times = dict.fromkeys(("compute_ns", "communication_ns", "memory_ns", "non_compute_ns", "idle_ns", "overlap_ns"), 0)
    rank = Breakdown(rank=0, source="gpu", steps=2, span_ns=100, collectives=tallies, kernels=[], **times)
    result = msgspec.structs.replace(RESULT, knobs={"effective": {"sync": sync}})
    found = measured(TWO_RANKS, result=result, gradient_accumulation_steps=passes).with_breakdowns([rank])
    values = [metric.of_run_at(found, "all_gather").value for metric in collective_passes.METRICS]
    assert values == [count, ms, pytest.approx(ms / count)]
    assert {metric.of_run_at(found, "all_reduce") for metric in collective_passes.METRICS} == {None}
    unknown = measured(TWO_RANKS, gradient_accumulation_steps=passes).with_breakdowns([rank])
    assert collective_passes.count_calls(unknown, "all_gather") is None


def test_without_checkpointing_hardware_and_model_flops_are_the_same():
    counted = msgspec.structs.replace(RESULT, flops_per_unit=1e12)
    known = {"result": counted, "hosts_of": [host_with("NVIDIA H200", "NVIDIA H200")]}
    assert mfu.compute_hfu(measured(TWO_RANKS, **known)) == mfu.compute_mfu(measured(TWO_RANKS, **known))
    assert mfu.compute_hfu(measured(TWO_RANKS, activation_checkpointing="full", **known)) is None


def test_step_time_is_of_the_slowest_rank_with_linear_percentiles():
    found = {share: compute_step_percentile(measured(TWO_RANKS), share).value for share in (0.05, 0.5, 0.95)}
    assert found == {0.05: pytest.approx(205.0), 0.5: pytest.approx(250.0), 0.95: pytest.approx(295.0)}


def test_the_loss_of_the_world_weighs_ranks_by_their_units():
    assert read_final_loss(measured(TWO_RANKS)).value == pytest.approx(2.0)
    assert steps.join_world_steps(measured(TWO_RANKS).timed_steps)["loss"].to_list() == pytest.approx([2.5, 2.0])


def test_a_step_that_a_rank_did_not_record_is_in_no_metric():
    ranks = {0: TWO_RANKS[0], 1: TWO_RANKS[1][:2]}
    assert throughput.measure_throughput(measured(ranks)).value == pytest.approx(1000 * 32 / 200)
    assert throughput.measure_throughput(measured({0: TWO_RANKS[0]}, gpus=2)) is None


def test_a_run_without_records_has_no_value_of_any_metric():
    empty = measured({})
    assert [metric.name for metric in load_metrics() if metric.of_run and metric.of_run(empty) is not None] == []


def test_peak_memory_is_the_gpu_allocators_else_the_process_and_says_which():
    rss = {r: [step(1, 1.0, rss_bytes=10 + r), step(2, 1.0, rss_bytes=7)] for r in (0, 1)}
    assert memory.measure_peak_memory(measured(rss)) == Quantity(11, "bytes", memory.KIND_BY_MEMORY_COLUMN["rss_bytes"])
    gpu = {0: [step(1, 9.0, warmup=True, allocated_bytes=99), step(1, 1.0, rss_bytes=500, allocated_bytes=40)]}
    assert memory.measure_peak_memory(measured(gpu)) == Quantity(40, "bytes", memory.KIND_BY_MEMORY_COLUMN["allocated_bytes"])
    assert memory.measure_peak_memory(measured({0: gpu[0], 1: [step(1, 1.0, rss_bytes=600)]})) is None
    assert memory.measure_peak_memory(measured({0: [step(1, 1.0)]})) is None


WINDOW = {0: [step(1, 1.0, wall_s=10.0), step(2, 1.0, wall_s=20.0)]}


def test_processors_are_averaged_over_the_timed_window_and_hosts():
    seen = [sample(5, cpu_pct=100), sample(10, cpu_pct=20), sample(20, cpu_pct=40), sample(21, cpu_pct=100)]
    other = [sample(12, host="b", cpu_pct=50), sample(13, host="b")]
    assert utilization.average_cpu_utilization(measured(WINDOW, seen)).value == pytest.approx(30)
    assert utilization.average_cpu_utilization(measured(WINDOW, seen + other)).value == pytest.approx(40)
    assert utilization.find_peak_cpu_utilization(measured(WINDOW, seen)).value == 40
    assert utilization.find_peak_cpu_utilization(measured(WINDOW, seen + other)).value == 50
    assert utilization.find_peak_cpu_utilization(measured(WINDOW, [sample(12)])) is None
    assert utilization.average_cpu_utilization(measured(WINDOW, [sample(12)])) is None


def test_utilization_is_averaged_over_gpus_and_absent_without_a_gpu():
    seen = [sample(12, gpus=[GpuSample(uuid="x", utilization_pct=80.0), GpuSample(uuid="y", utilization_pct=40.0)])]
    assert utilization.average_gpu_utilization(measured(WINDOW, seen)).value == pytest.approx(60)
    assert utilization.average_gpu_utilization(measured(WINDOW, [sample(12, cpu_pct=1)])) is None


def test_bytes_are_counted_between_the_first_and_the_last_timed_step():
    seen = [sample(t, nics=[nic(1000 + 100 * t), nic(7 * t, "lo", "loopback")]) for t in (0, 9, 11, 13, 15, 17, 19, 21, 40)]
    found = measured(WINDOW, seen)
    # The counter grows by 100 bytes per second. Its values at 10 s and at 20 s are interpolated between samples.
    assert network.measure_network_bytes(found).value == pytest.approx(1000)
    assert network.measure_loopback_bytes(found).value == pytest.approx(70)


def gloo(*steps_ended_s, sent, seen, backend="gloo", **result):
    """A run with the backend gloo.

    steps_ended_s: the end of each step in seconds. sent: the bytes that the strategy puts on the wire in each step, in theory.
    seen: the telemetry samples.
    """
    counts = msgspec.structs.replace(RESULT, communication_bytes={"theory": sent / 2, "wire": sent}, **result)
    found = measured({0: [step(n, 1.0, wall_s=at) for n, at in enumerate(steps_ended_s, 1)]}, seen, result=counts)
    found.backend = backend
    return found


def test_counters_are_compared_with_the_bytes_of_collectives_over_gloo():
    moments = [count / 20 for count in range(801)]  # 20 samples per second for 40 s
    both = [sample(t, nics=[nic(round(100 * t)), nic(round(7 * t), "lo", "loopback")]) for t in moments]
    alone = [sample(t, nics=[nic(round(107 * t), "lo", "loopback")]) for t in moments]
    for seen in (both, alone):
        assert wire.compute_wire_difference(gloo(10, 15, 20, sent=500, seen=seen)).value == pytest.approx(
            7
        )  # 1070 and not 1000 bytes
        assert wire.compute_wire_difference(gloo(10, 15, 20, sent=535, seen=seen)).value == pytest.approx(0)
    assert wire.compute_wire_difference(gloo(10, 15, 20, sent=500, seen=both, backend="nccl")) is None
    assert wire.compute_wire_difference(gloo(10, 15, 20, sent=0, seen=both)) is None
    assert wire.compute_wire_difference(gloo(10, 15, 20, sent=500, seen=both, instruments={"validation": {}})) is None
    unknown = [sample(t, nics=[nic(round(100 * t))]) for t in moments]
    assert wire.compute_wire_difference(gloo(10, 15, 20, sent=500, seen=unknown)) is None
    rare = both[::100]
    # The samples are 5 s apart, so the counter's values at the ends of the steps are too uncertain.
    assert wire.compute_wire_difference(gloo(10, 15, 20, sent=500, seen=rare)) is None


def test_virtual_interfaces_count_only_where_a_host_has_no_physical_one():
    both = [sample(t, nics=[nic(100 * t), nic(100 * t, "docker0", "virtual")]) for t in (9, 21)]
    only = [sample(t, host="b", nics=[nic(10 * t, "veth0", "virtual")]) for t in (9, 21)]
    assert network.measure_network_bytes(measured(WINDOW, both)).value == pytest.approx(1000)
    assert network.measure_network_bytes(measured(WINDOW, both + only)).value == pytest.approx(1100)


@pytest.mark.parametrize(
    "seen",
    [
        [sample(9, nics=[nic(500)]), sample(15, nics=[nic(100)]), sample(21, nics=[nic(900)])],
        [sample(9, nics=[nic(500)], boot="1"), sample(21, nics=[nic(900)], boot="2")],
        [sample(9, nics=[nic(500)])],
        [sample(12, nics=[nic(500)]), sample(15, nics=[nic(600)])],
        [sample(9)],
        [],
    ],
    ids=["backwards", "another boot", "one sample", "a third covered", "no interface", "no telemetry"],
)
def test_a_counter_that_cannot_be_trusted_gives_no_number(seen):
    assert network.measure_network_bytes(measured(WINDOW, seen)) is None


CARD, OTHER_CARD = {"mac": "02:00:00:00:00:01", "pci": "0000:c5:00.0"}, {"mac": "02:00:00:00:00:02", "pci": "0000:c5:00.1"}
SAME_PORT = CARD | {"mac": "02:00:00:00:00:02"}
NO_DEVICE = {"kind": "virtual", "mac": "02:00:00:00:00:03"}


@pytest.mark.parametrize(
    ("moments", "sent"),
    [
        # udev renames a network card: the counter of the card continues under the new name.
        ([[nic(0, "eth0", **CARD)], [nic(600, "ens5", **CARD)], [nic(1200, "ens5", **CARD)]], 1000),
        # Bonding gives a port the MAC address of another port: the port's device shows that its counter continues.
        ([[nic(0, **CARD)], [nic(600, **SAME_PORT)], [nic(1200, **SAME_PORT)]], 1000),
        # A virtual interface that is renamed has no device, so it is identified by its MAC address.
        ([[nic(0, "veth1", **NO_DEVICE)], [nic(600, "pod0", **NO_DEVICE)], [nic(1200, "pod0", **NO_DEVICE)]], 1000),
        # Two cards swap their names: one card sent 600 bytes from 9 s to 21 s, the other 1200.
        (
            [[nic(0, "a", **CARD), nic(5000, "b", **OTHER_CARD)], [nic(5600, "a", **OTHER_CARD), nic(300, "b", **CARD)],
             [nic(6200, "a", **OTHER_CARD), nic(600, "b", **CARD)]],
            1500,
        ),
        # Two ports of a bond have the same MAC address and device. Both are in every sample, so their counters are added.
        ([[nic(at, "a", **CARD), nic(at, "b", **CARD)] for at in (0, 600, 1200)], 2000),
        # Another card replaces the first card and gets its name: the bytes sent between these samples are unknown.
        ([[nic(0, **CARD)], [nic(600, **OTHER_CARD)], [nic(1200, **OTHER_CARD)]], None),
        ([[nic(0, "v", "virtual", CARD["mac"])], [nic(600, "v", **NO_DEVICE)], [nic(1200, "v", **NO_DEVICE)]], None),
    ],
    ids=["renamed", "other address", "virtual", "names exchanged", "bond", "other card", "made again"],
)  # fmt: skip
def test_an_interface_is_identified_by_device_and_mac_address(moments, sent):
    """An interface is identified by its device and MAC address, so that its counter continues under another name."""
    seen = [sample(at, nics=nics) for at, nics in zip((9, 15, 21), moments, strict=True)]
    found = network.measure_network_bytes(measured(WINDOW, seen))
    assert (found and found.value) == (None if sent is None else pytest.approx(sent))
    alike = [sample(at, host="b", nics=[nic(100 * at)]) for at in (9, 21)]  # an interface of another host with the same name
    found = network.measure_network_bytes(measured(WINDOW, seen + alike))
    assert (found and found.value) == (None if sent is None else pytest.approx(sent + 1000))


def test_scaling_is_strong_with_the_global_batch_and_weak_with_the_batch_per_rank():
    single = support.cell("single", 1, global_batch_size=8, micro_batch_size=8)
    strong, weak = support.cell("ddp", 4, micro_batch_size=2), support.cell("ddp", 4, global_batch_size=32, micro_batch_size=8)
    other = support.cell("ddp", 4, global_batch_size=64, micro_batch_size=16)
    for what, kind in ((strong, "strong"), (weak, "weak")):
        compared = MeanPair(what, 300.0, single, 100.0)
        assert (scaling.compute_speed_up(compared).value, scaling.compute_speed_up(compared).kind) == (pytest.approx(3), kind)
        assert (scaling.compute_scaling_efficiency(compared).value, scaling.compute_scaling_efficiency(compared).unit) == (
            pytest.approx(75),
            "%",
        )
    assert scaling.compute_speed_up(MeanPair(other, 300.0, single, 100.0)) is None
    assert scaling.compute_scaling_efficiency(MeanPair(strong, 300.0, single, 0.0)) is None


def test_the_interval_is_students():
    """The confidence interval of repeats is the interval of Student's t distribution."""
    found = statistics.estimate_mean([10.0, 12.0, 14.0], "ms")  # half width: t(2) x s / sqrt(3) = 4.303 x 2 / sqrt(3) = 4.969
    assert (found.value, found.median, found.n) == (12.0, 12.0, 3)
    assert (found.low, found.high) == (pytest.approx(12 - 4.969, abs=1e-3), pytest.approx(12 + 4.969, abs=1e-3))
    alone = statistics.estimate_mean([5.0], "ms")
    assert (alone.value, alone.low, alone.high) == (5.0, None, None)
    pair = statistics.estimate_mean([1.0, 3.0], "ms")
    assert pair.high == pytest.approx(2 + 12.706)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (30, 2.042), (31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799)])
def test_quantiles_of_student_are_those_of_the_tables(degrees, t):
    assert statistics.compute_t_975(degrees) == pytest.approx(t, abs=6e-4)


def test_no_degree_of_freedom_has_no_quantile():
    with pytest.raises(ValueError, match="0 degrees"):
        statistics.compute_t_975(0)


@pytest.mark.parametrize(
    ("times", "incomplete", "coverage_pct"),
    [
        ((9, 12, 15, 18, 21), "", 100),
        ((10, 13, 16, 19), "", 90),  # complete: with this period, the next sample would be at 22 s
        ((9, 10, 11, 12, 13), "no samples in the last 7.0 s", 30),
        ((1, 2, 3), "no samples in the last 17.0 s", 0),
        ((18, 19, 20, 21), "no samples in the first 8.0 s", 20),
        ((15,), "one sample", 0),
        ((), "no samples", 0),
    ],
)
def test_a_host_whose_sampler_ended_early_is_reported_to_lack_samples(times, incomplete, coverage_pct):
    seen = measured(WINDOW, [sample(9, host="b"), sample(10, host="b"), *(sample(time) for time in times)])
    found = {entry.host: entry for entry in telemetry.compute_coverage("r", seen.timed_steps, seen.samples, ["a"], {}, {}, {})}
    entry = found["a"]
    assert (entry.samples, entry.incomplete, entry.coverage_pct) == (len(times), incomplete, pytest.approx(coverage_pct))
    assert found["b"].incomplete == "no samples in the last 10.0 s"  # b has samples, but ["a"] does not list it
    nothing_timed = telemetry.compute_coverage("r", seen.timed_steps.clear(), seen.samples, ["a"], {}, {}, {})
    assert [entry.incomplete for entry in nothing_timed] == ["", ""]


def test_coverage_counts_gaps_out_and_names_the_largest():
    share, gap = telemetry.measure_coverage([9, 10, 11, 12, 16, 17, 18, 19, 20, 21], (10.0, 20.0))
    assert (share, gap) == (pytest.approx(60), pytest.approx(4))
    assert telemetry.measure_coverage([], (10.0, 20.0)) == (0, 10)


def test_the_early_last_sample_of_a_short_run_makes_no_gap_of_the_usual_distance():
    assert telemetry.measure_coverage([9.8, 10.3, 10.4], (10.0, 10.4))[0] == pytest.approx(100)
    assert telemetry.measure_coverage([9.8, 10.5, 10.6], (10.0, 10.6))[0] == pytest.approx(100 / 6)  # 0.7 s is a gap


POSITIVE = st.floats(0.1, 1e4, allow_nan=False)
RANKS = st.integers(1, 3).flatmap(
    lambda world: st.lists(st.lists(POSITIVE, min_size=world, max_size=world), min_size=1, max_size=12)
)


def ranks_of(times, scale=1.0):
    world = len(times[0])
    return {r: [step(n, ms[r] * scale, loss=ms[r]) for n, ms in enumerate(times, 1)] for r in range(world)}


@settings(deadline=None, max_examples=100 if LONG else 10)  # few examples, because each one computes every metric twice
@given(RANKS, st.randoms())
def test_the_order_of_records_changes_nothing(times, random):
    ranks = ranks_of(times)
    shuffled = {rank: random.sample(records, len(records)) for rank, records in reversed(ranks.items())}
    in_order, out_of_order = measured(ranks), measured(shuffled)
    for metric in load_metrics():
        if metric.of_run:
            one, other = metric.of_run(in_order), metric.of_run(out_of_order)
            assert one == other or one.value == pytest.approx(other.value), metric.name


@settings(deadline=None)
@given(RANKS, st.floats(0.01, 100))
def test_slower_steps_scale_times_up_and_throughput_down(times, scale):
    one, other = measured(ranks_of(times)), measured(ranks_of(times, scale))
    assert throughput.measure_throughput(other).value == pytest.approx(throughput.measure_throughput(one).value / scale)
    assert compute_step_percentile(other, 0.95).value == pytest.approx(compute_step_percentile(one, 0.95).value * scale)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=12, max_size=30), st.floats(0.01, 100))
def test_energy_scales_with_power_and_lies_between_its_extremes(watts, scale):
    times = [10 + 10 * place / (len(watts) - 1) for place in range(len(watts))]
    one, other = (
        energy.measure_energy(measured(WINDOW, [power(time, factor * value) for time, value in zip(times, watts)])).value
        for factor in (1.0, scale)
    )
    assert other == pytest.approx(scale * one)
    assert 10 * min(watts) - 1e-6 <= one <= 10 * max(watts) + 1e-6


PERIOD_S = 12 / 29  # the period of 30 samples from 9 s to 21 s; the timed steps (WINDOW) are from 10 s to 20 s


@settings(deadline=None)
@given(st.integers(1, 28), st.integers(0, 12))
def test_energy_of_a_constant_draw_is_exact_or_absent_if_samples_are_missing(first, missing):
    """Some consecutive samples of a constant power are left out: `missing` samples, starting with sample `first`.

    One missing sample is not a gap. If a gap leaves less than 8 of the 10 s with samples, the metric has no value.
    """
    there = [place for place in range(30) if not first <= place < min(first + missing, 29)]
    end_s = 9 + PERIOD_S * min(first + missing, 29)
    gap_s = max(min(end_s, 20) - max(9 + PERIOD_S * (first - 1), 10), 0) if len(there) < 29 else 0
    found = energy.measure_energy(measured(WINDOW, [power(9 + PERIOD_S * place, 100.0) for place in there]))
    if gap_s > 2:
        assert found is None
    else:
        assert found.value == pytest.approx(1000)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=30))
def test_a_counter_that_only_grows_never_gives_a_negative_number(increments):
    total, seen = 0, []
    for index, increment in enumerate(increments):
        total += increment
        seen.append(sample(5 + 25 * index / (len(increments) - 1), nics=[nic(total)]))
    found = network.measure_network_bytes(measured(WINDOW, seen))
    assert found is not None
    assert 0 <= found.value <= total


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=40))
def test_the_interval_holds_the_mean_and_the_mean_the_values(values):
    found = statistics.estimate_mean(values, "")
    assert found.low <= found.value <= found.high
    assert min(values) - 1e-3 <= found.value <= max(values) + 1e-3


@given(st.lists(st.floats(0, 1), max_size=3000))
def test_fewer_points_keep_every_extreme(values):
    x, y = thin_points(list(range(len(values))), values, max_points=100)
    assert len(y) <= max(102, 0)
    assert x == sorted(x)
    if values:
        assert (min(y), max(y)) == (min(values), max(values))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,234,567"), (102.24, "102.2"), (2.79871, "2.799"), (0.00012344, "0.0001234"), (1.2e-9, "1.200e-09")],
)
def test_numbers_have_digits_enough_to_compare(value, text):
    assert notation.format_number(value) == text


def test_nan_and_zero_are_printed_as_such():
    """NaN is printed as `nan`, and 0 as `0`."""
    assert notation.format_number(math.nan) == "nan"
    assert notation.format_number(0.0) == "0"


def test_every_metric_has_a_description():
    names = [metric.name for metric in load_metrics()]
    assert len(names) == len(set(names))
    assert {"throughput_per_s", "step_time_ms", "peak_memory_bytes", "speed_up", "final_loss", "network_bytes"} <= set(names)
    for metric in load_metrics():
        assert metric.definition.endswith(".")
        assert sum(ask is not None for ask in (metric.of_run, metric.of_run_at, metric.of_cells)) == 1
        assert bool(metric.compares) == (metric.of_cells is not None)
        of = {other.name: other for other in load_metrics()}.get(metric.compares, metric)
        assert of.of_cells is None
        assert (metric.argument, type(metric.example)) == (of.argument, type(of.example))
        assert bool(of.argument) == (of.of_run_at is not None) == (of.example is not None)


def test_a_frame_of_no_records_has_its_columns():
    assert steps.build_step_frames(steps.RecordedSteps({})).all_steps.schema == pl.Schema(steps.STEP_COLUMN_TYPES)


def test_ranks_that_share_a_model_count_their_units_once():
    """Four ranks train two copies of the model, so each copy is on two ranks.

    Every rank records the 64 units of its copy's part of the batch, so the step trained on 128 units, not on 256.
    """
    records = {
        rank: [StepRecord(schema=1, step=1, t_s=1.0, wall_s=2.0, loss=1.0, units=64, step_ms=500.0)] for rank in range(4)
    }
    frames = steps.build_step_frames(steps.RecordedSteps(records, ranks=4, data_ranks=2))
    assert frames.timed_steps["units"].sum() == 128
    assert frames.world_steps["loss"].to_list() == [1.0]


def test_memory_when_memory_ran_out_is_that_of_the_rank_that_says_the_most(tmp_path, capsys):
    """The process of rank 2 was out of host memory, and its error says no size. The completed repeat has no such value."""
    workspace, cell = Workspace(tmp_path), support.cell("ddp", 4)
    support.keep(workspace, [cell], repeats=2)
    folder = support.prepare(workspace, cell)
    support.event(folder, "started", -2)
    support.event(folder, "oom", 7, why="CUDA", requested_bytes=512, allocated_bytes=3000, reserved_bytes=4000)
    support.event(folder, "oom", 8, why="CUDA", requested_bytes=256, allocated_bytes=5000, reserved_bytes=5500)
    support.event(folder, "oom", 8, why="Slurm")
    support.event(folder, "exited", 9, code=1)
    support.completed(workspace, cell, 2)
    (row,) = summary.summarize(load.load_matrix(workspace, None), "single").rows
    sizes = {"oom_allocated_bytes": 5000, "oom_reserved_bytes": 5500, "oom_requested_bytes": 512}
    assert row.runs[0].metrics == sizes
    assert {name: (row.metrics[name].value, row.metrics[name].n) for name in sizes} == {
        name: (size, 1) for name, size in sizes.items()
    }
    assert not sizes.keys() & row.runs[1].metrics.keys()
    assert row.metrics["final_loss"].n == 1
    assert main(["explain", row.id, "oom_allocated_bytes", "--workspace", str(tmp_path), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert [run["value"] for run in explained["runs"]] == [5000, None]
