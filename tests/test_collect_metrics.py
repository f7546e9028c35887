"""Every figure of merit against values worked out by hand, and what must not change it."""

import math

import msgspec
import polars as pl
import pytest
import support_collect as support
from hypothesis import given, settings
from hypothesis import strategies as st

from collect import notation, statistics, telemetry
from collect.figure import thin
from collect.metric import Compared, Measured, Quantity, menu
from collect.metrics import memory, mfu, network, scaling, throughput, utilization
from collect.metrics.accuracy import final_accuracy
from collect.metrics.loss import final_loss
from collect.metrics.step_time import percentile
from collect.sources import samples, steps
from shardlab.host import Gpu, Host
from shardlab.record import GpuSample, NicSample, Result, Sample, StepRecord

RESULT = Result(schema=1, run_id="r", state="completed", rehearsal=True, steps=2, unit="tokens")


def step(number, ms, *, loss=1.0, units=8, warmup=False, wall_s=None, **more):
    wall = float(number if wall_s is None else wall_s)
    return StepRecord(schema=1, step=number, t_s=wall, wall_s=wall, loss=loss, units=units, step_ms=ms, warmup=warmup, **more)


def sample(wall_s, *, host="a", boot="1", nics=(), gpus=None, **more):
    return Sample(schema=1, t_s=wall_s, wall_s=wall_s, host=host, boot_id=boot, nics=list(nics) or None, gpus=gpus, **more)


def nic(tx_bytes, name="eth0", kind="physical"):
    return NicSample(name=name, kind=kind, tx_bytes=tx_bytes)


def measured(ranks, telemetry_of=(), gpus=None, *, result=RESULT, hosts_of=(), **keys):
    frame = steps.frame(ranks)
    hosts = {}
    for entry in telemetry_of:
        hosts.setdefault(entry.host, []).append(entry)
    world = gpus or max(len(ranks), 1)
    cell = msgspec.structs.replace(support.cell("ddp", world), **keys)
    return Measured(cell, steps.timed(frame, world, world), samples.frames(hosts), result, list(hosts_of))


TWO_RANKS = {
    0: [step(1, 900.0, warmup=True), step(1, 100.0, loss=4.0, units=8), step(2, 300.0, loss=3.0, units=8)],
    1: [step(1, 800.0, warmup=True), step(1, 200.0, loss=2.0, units=24), step(2, 250.0, loss=1.0, units=8)],
}


def test_throughput_is_all_units_over_the_slowest_ranks_time():
    found = throughput.throughput(measured(TWO_RANKS))  # (8 + 24 + 8 + 8) units in 200 + 300 ms; warm-up is not in it
    assert (found.value, found.unit) == (pytest.approx(96.0), "tokens/s")


def host_with(*names):
    return Host(
        schema=1, host="a", boot_id="1", kernel="", system="", cpu_model=None, cpus=1, cpus_allowed=1, memory_bytes=1, nics=[],
        python="", packages={}, gpus=[Gpu(uuid=str(number), name=name) for number, name in enumerate(names)],
    )  # fmt: skip


def test_mfu_is_the_share_of_the_gpus_peak_that_the_model_needs():
    counted = msgspec.structs.replace(RESULT, flops_per_unit=1e12)  # 96 tokens/s of 1 TFLOP on two A100, 312 TFLOP/s each
    a100 = host_with("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB")
    found = mfu.mfu(measured(TWO_RANKS, result=counted, hosts_of=[a100], precision="bf16"))
    assert (found.value, found.unit) == (pytest.approx(100 * 96 / 624), "%")
    assert mfu.mfu(measured(TWO_RANKS, result=counted, hosts_of=[a100], precision="fp32")).value == pytest.approx(100 * 96 / 39)


@pytest.mark.parametrize("names", [(), ("NVIDIA Unheard-of 9000",), ("NVIDIA A100-SXM4-40GB", "NVIDIA H200")])
def test_mfu_is_blank_where_the_peak_is_not_known(names):
    counted = msgspec.structs.replace(RESULT, flops_per_unit=1e12)
    assert mfu.mfu(measured(TWO_RANKS, result=counted, hosts_of=[host_with(*names)])) is None
    assert mfu.mfu(measured(TWO_RANKS, hosts_of=[host_with("NVIDIA H200")])) is None  # FLOPs of a unit are not known


def test_a_watched_step_counts_for_its_loss_and_for_no_time():
    ranks = {0: [step(1, 100.0), step(2, 9000.0, watched=True, loss=3.0)]}
    assert throughput.throughput(measured(ranks)).value == pytest.approx(80.0)
    assert percentile(0.95)(measured(ranks)).value == pytest.approx(100.0)
    assert final_loss(measured(ranks)).value == 3.0


def test_accuracy_is_that_of_the_result_in_percent():
    assert final_accuracy(measured(TWO_RANKS)) is None
    found = final_accuracy(measured(TWO_RANKS, result=msgspec.structs.replace(RESULT, final_accuracy=0.75)))
    assert (found.value, found.unit) == (75.0, "%")


def test_step_time_is_of_the_slowest_rank_with_linear_percentiles():
    found = {share: percentile(share)(measured(TWO_RANKS)).value for share in (0.05, 0.5, 0.95)}
    assert found == {0.05: pytest.approx(205.0), 0.5: pytest.approx(250.0), 0.95: pytest.approx(295.0)}


def test_the_loss_of_the_world_weighs_ranks_by_their_units():
    assert final_loss(measured(TWO_RANKS)).value == pytest.approx(2.0)
    assert steps.of_world(measured(TWO_RANKS).steps)["loss"].to_list() == pytest.approx([2.5, 2.0])


def test_a_step_that_a_rank_did_not_record_is_in_no_metric():
    ranks = {0: TWO_RANKS[0], 1: TWO_RANKS[1][:2]}
    assert throughput.throughput(measured(ranks)).value == pytest.approx(1000 * 32 / 200)
    assert throughput.throughput(measured({0: TWO_RANKS[0]}, gpus=2)) is None


def test_nothing_recorded_gives_no_number_in_any_metric():
    empty = measured({})
    assert [metric.name for metric in menu() if metric.of_run and metric.of_run(empty) is not None] == []


def test_peak_memory_is_the_gpu_allocators_else_the_process_and_says_which():
    rss = {r: [step(1, 1.0, rss_bytes=10 + r), step(2, 1.0, rss_bytes=7)] for r in (0, 1)}
    assert memory.peak_memory(measured(rss)) == Quantity(11, "bytes", memory.KINDS["rss_bytes"])
    gpu = {0: [step(1, 9.0, warmup=True, allocated_bytes=99), step(1, 1.0, rss_bytes=500, allocated_bytes=40)]}
    assert memory.peak_memory(measured(gpu)) == Quantity(40, "bytes", memory.KINDS["allocated_bytes"])
    assert memory.peak_memory(measured({0: gpu[0], 1: [step(1, 1.0, rss_bytes=600)]})) is None
    assert memory.peak_memory(measured({0: [step(1, 1.0)]})) is None


WINDOW = {0: [step(1, 1.0, wall_s=10.0), step(2, 1.0, wall_s=20.0)]}


def test_processors_are_averaged_over_the_timed_window_and_hosts():
    seen = [sample(5, cpu_pct=100), sample(10, cpu_pct=20), sample(20, cpu_pct=40), sample(21, cpu_pct=100)]
    other = [sample(12, host="b", cpu_pct=50), sample(13, host="b")]
    assert utilization.cpu(measured(WINDOW, seen)).value == pytest.approx(30)
    assert utilization.cpu(measured(WINDOW, seen + other)).value == pytest.approx(40)
    assert utilization.cpu(measured(WINDOW, [sample(12)])) is None


def test_gpus_are_averaged_and_absent_without_one():
    seen = [sample(12, gpus=[GpuSample(uuid="x", utilization_pct=80.0), GpuSample(uuid="y", utilization_pct=40.0)])]
    assert utilization.gpu(measured(WINDOW, seen)).value == pytest.approx(60)
    assert utilization.gpu(measured(WINDOW, [sample(12, cpu_pct=1)])) is None


def test_bytes_are_counted_between_the_first_and_the_last_timed_step():
    seen = [sample(t, nics=[nic(1000 + 100 * t), nic(7 * t, "lo", "loopback")]) for t in (0, 9, 11, 19, 21, 40)]
    found = measured(WINDOW, seen)
    assert network.network(found).value == pytest.approx(1000)  # 100 bytes a second from 10 s to 20 s, edges interpolated
    assert network.loopback(found).value == pytest.approx(70)


def test_virtual_interfaces_count_only_where_a_host_has_no_physical_one():
    both = [sample(t, nics=[nic(100 * t), nic(100 * t, "docker0", "virtual")]) for t in (9, 21)]
    only = [sample(t, host="b", nics=[nic(10 * t, "veth0", "virtual")]) for t in (9, 21)]
    assert network.network(measured(WINDOW, both)).value == pytest.approx(1000)
    assert network.network(measured(WINDOW, both + only)).value == pytest.approx(1100)


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
    assert network.network(measured(WINDOW, seen)) is None


def test_scaling_is_strong_with_the_global_batch_and_weak_with_the_batch_per_rank():
    single = support.cell("single", 1, global_batch_size=8, micro_batch_size=8)
    strong, weak = support.cell("ddp", 4, micro_batch_size=2), support.cell("ddp", 4, global_batch_size=32, micro_batch_size=8)
    other = support.cell("ddp", 4, global_batch_size=64, micro_batch_size=16)
    for what, kind in ((strong, "strong"), (weak, "weak")):
        compared = Compared(what, 300.0, single, 100.0)
        assert (scaling.speed_up(compared).value, scaling.speed_up(compared).kind) == (pytest.approx(3), kind)
        assert (scaling.efficiency(compared).value, scaling.efficiency(compared).unit) == (pytest.approx(75), "%")
    assert scaling.speed_up(Compared(other, 300.0, single, 100.0)) is None
    assert scaling.efficiency(Compared(strong, 300.0, single, 0.0)) is None


def test_the_interval_is_students():
    found = statistics.estimate([10.0, 12.0, 14.0], "ms")  # s = 2, t(2) = 4.303: 4.303 x 2 / sqrt(3) = 4.969
    assert (found.value, found.median, found.n) == (12.0, 12.0, 3)
    assert (found.low, found.high) == (pytest.approx(12 - 4.969, abs=1e-3), pytest.approx(12 + 4.969, abs=1e-3))
    alone = statistics.estimate([5.0], "ms")
    assert (alone.value, alone.low, alone.high) == (5.0, None, None)
    pair = statistics.estimate([1.0, 3.0], "ms")
    assert pair.high == pytest.approx(2 + 12.706)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (30, 2.042), (31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799)])
def test_quantiles_of_student_are_those_of_the_tables(degrees, t):
    assert statistics.t_975(degrees) == pytest.approx(t, abs=6e-4)


def test_no_degree_of_freedom_has_no_quantile():
    with pytest.raises(ValueError, match="0 degrees"):
        statistics.t_975(0)


def test_coverage_counts_gaps_out_and_names_the_largest():
    share, gap = telemetry.covered([9, 10, 11, 12, 16, 17, 18, 19, 20, 21], (10.0, 20.0))
    assert (share, gap) == (pytest.approx(60), pytest.approx(4))
    assert telemetry.covered([], (10.0, 20.0)) == (0, 10)


POSITIVE = st.floats(0.1, 1e4, allow_nan=False)
RANKS = st.integers(1, 3).flatmap(
    lambda world: st.lists(st.lists(POSITIVE, min_size=world, max_size=world), min_size=1, max_size=12)
)


def ranks_of(times, scale=1.0):
    world = len(times[0])
    return {r: [step(n, ms[r] * scale, loss=ms[r]) for n, ms in enumerate(times, 1)] for r in range(world)}


@settings(deadline=None)
@given(RANKS, st.randoms())
def test_the_order_of_records_changes_nothing(times, random):
    ranks = ranks_of(times)
    shuffled = {rank: random.sample(records, len(records)) for rank, records in reversed(ranks.items())}
    for metric in menu():
        if metric.of_run:
            one, other = metric.of_run(measured(ranks)), metric.of_run(measured(shuffled))
            assert one == other or one.value == pytest.approx(other.value), metric.name


@given(RANKS, st.floats(0.01, 100))
def test_slower_steps_scale_times_up_and_throughput_down(times, scale):
    one, other = measured(ranks_of(times)), measured(ranks_of(times, scale))
    assert throughput.throughput(other).value == pytest.approx(throughput.throughput(one).value / scale)
    assert percentile(0.95)(other).value == pytest.approx(percentile(0.95)(one).value * scale)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=30))
def test_a_counter_that_only_grows_never_gives_a_negative_number(increments):
    total, seen = 0, []
    for index, increment in enumerate(increments):
        total += increment
        seen.append(sample(5 + 25 * index / (len(increments) - 1), nics=[nic(total)]))
    found = network.network(measured(WINDOW, seen))
    assert found is not None
    assert 0 <= found.value <= total


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=40))
def test_the_interval_holds_the_mean_and_the_mean_the_values(values):
    found = statistics.estimate(values, "")
    assert found.low <= found.value <= found.high
    assert min(values) - 1e-3 <= found.value <= max(values) + 1e-3


@given(st.lists(st.floats(0, 1), max_size=3000))
def test_fewer_points_keep_every_extreme(values):
    x, y = thin(list(range(len(values))), values, most=100)
    assert len(y) <= max(102, 0)
    assert x == sorted(x)
    if values:
        assert (min(y), max(y)) == (min(values), max(values))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,234,567"), (102.24, "102.2"), (2.79871, "2.799"), (0.00012344, "0.0001234"), (1.2e-9, "1.200e-09")],
)
def test_numbers_have_digits_enough_to_compare(value, text):
    assert notation.number(value) == text


def test_numbers_that_are_none_are_said():
    assert notation.number(math.nan) == "nan"
    assert notation.number(0.0) == "0"


def test_every_metric_says_what_it_is():
    names = [metric.name for metric in menu()]
    assert len(names) == len(set(names))
    assert {"throughput_per_s", "step_time_ms", "peak_memory_bytes", "speed_up", "final_loss", "network_bytes"} <= set(names)
    for metric in menu():
        assert metric.definition.endswith(".")
        assert sum(ask is not None for ask in (metric.of_run, metric.of_run_at, metric.of_cells)) == 1
        assert bool(metric.argument) == (metric.of_run_at is not None)


def test_a_frame_of_no_records_has_its_columns():
    assert steps.frame({}).schema == pl.Schema(steps.SCHEMA)


def test_ranks_that_share_a_model_count_their_units_once():
    """Four ranks, two of them to a model: every rank records the 64 units of its slice; the step trained on 128."""
    records = {
        rank: [StepRecord(schema=1, step=1, t_s=1.0, wall_s=2.0, loss=1.0, units=64, step_ms=500.0)] for rank in range(4)
    }
    shared = steps.timed(steps.frame(records), 4, 2)
    assert shared["units"].sum() == 128
    assert steps.of_world(shared)["loss"].to_list() == [1.0]
