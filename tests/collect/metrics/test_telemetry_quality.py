"""Faults of telemetry: restarted samplers, changed clocks, lost GPUs, missed rates. Some metrics then have no value."""

import msgspec
import pytest
import support_collect as support

from collect import summary
from collect.loading import telemetry
from collect.metrics import energy, gpu_links, network, rank_io, utilization
from collect.reading import load
from shardlab.record_types import ClockOffset
from shardlab.runs.record import CLOCK_EVENT, SAMPLER_ENDED, GpuSample, LineWriter, NicSample, RdmaSample, Sample
from shardlab.workspace.workspace import Workspace
from tests.collect.metrics.test_metrics import RESULT, WINDOW, measured, nic, sample, step

TIMES = (9, 11, 13, 15, 17, 19, 21)

FUNCTIONS = {metric.name: metric.of_run for metric in network.METRICS}


def covered(run, ends=None, clocks=None):
    (entry,) = telemetry.compute_coverage("r", run.timed_steps, run.samples, [], ends or {}, clocks or {}, run.clock_steps)
    return entry


def test_the_achieved_sampling_rate_is_a_share_of_the_requested_rate():
    # The requested rate is 2 samples per second, and every fourth sample is missing, so 75 % of the rate was kept.
    seen = [sample(9 + tick / 2, started_hz=2 if tick == 0 else None) for tick in range(26) if tick % 4]
    assert covered(measured(WINDOW, [sample(8.9, started_hz=2.0), *seen])).rate_kept_pct == pytest.approx(75, abs=5)
    assert covered(measured(WINDOW, seen)).rate_kept_pct is None  # no sample names the requested rate


def restepped(at, by):
    """Telemetry samples of a host whose wall clock is set forward by `by` seconds at time `at` of the monotonic clock."""
    return [
        msgspec.structs.replace(
            sample(t, nics=[nic(100 * t)], gpus=[GpuSample(uuid="0", energy_j=10.0 * t)]), wall_s=t + (by if t >= at else 0)
        )
        for t in TIMES
    ]


@pytest.mark.parametrize(("by", "said"), [(-3.0, "set back by 3.0 s"), (0.7, "set forward by 0.7 s")])
def test_a_wall_clock_set_during_a_run_is_reported_and_blanks_energy_and_traffic(by, said):
    """If the wall clock was set during timed steps, the report says so, and energy and traffic have no value."""
    run = measured(WINDOW, restepped(15, by))
    assert said in covered(run).trouble
    assert energy.measure_energy(run) is None
    assert network.measure_network_bytes(run) is None
    kept = measured(WINDOW, restepped(99, by))
    assert covered(kept).trouble == ""
    assert (energy.measure_energy(kept).value, network.measure_network_bytes(kept).value) == (
        pytest.approx(100),
        pytest.approx(1000),
    )


def test_a_pause_between_reading_the_two_clocks_is_no_step():
    """The sampler may pause between reading its two clocks. One late sample does not count as a change of the clock."""
    late = [msgspec.structs.replace(one, wall_s=one.wall_s + 0.5) if one.t_s == 15 else one for one in restepped(99, 0)]
    assert covered(measured(WINDOW, late)).clock_step_s is None


def test_a_counter_that_was_reset_or_wrapped_gives_no_number():
    for values in ((100, 200, 300, 10, 110, 210, 310), (2**32 - 9, 2**32 - 5, 2**32 - 1, 3, 7, 11, 15)):
        seen = [sample(at, nics=[nic(value)]) for at, value in zip(TIMES, values, strict=True)]
        assert network.measure_network_bytes(measured(WINDOW, seen)) is None


def test_traffic_is_refused_where_the_samples_have_a_gap():
    """The samples have a gap of 8.5 s, so they do not show whether the counter of the interface was reset in the gap."""
    seen = [sample(at, nics=[nic(int(100 * at))]) for at in (9, 9.5, 10, 10.5, 11, 19.5, 20, 20.5, 21)]
    assert network.measure_network_bytes(measured(WINDOW, seen)) is None


def test_a_restarted_sampler_counts_on():
    """A restart of the sampler does not reset the counters, so traffic still has a value."""
    seen = [sample(at, nics=[nic(100 * at)], started_hz=0.5 if at in (9, 15) else None) for at in TIMES]
    run = measured(WINDOW, seen)
    assert network.measure_network_bytes(run).value == pytest.approx(1000)
    assert covered(run, {"a": 1}).trouble == "its sampler ended 1 time while the run went on"


def both(at, **more):
    return NicSample(name="eth0", kind="physical", tx_bytes=0, rx_bytes=50 * at, **more)


def test_received_bytes_and_faults_are_shown():
    faulty = {"rx_errors": 1, "tx_errors": 2, "tx_dropped": 3}
    seen = [sample(at, nics=[both(at, rx_dropped=4 * at, **faulty)]) for at in TIMES]
    run = measured(WINDOW, seen)
    assert (network.measure_received_bytes(run).value, network.measure_received_bytes(run).unit) == (
        pytest.approx(500),
        "bytes",
    )
    assert (network.count_network_faults(run).value, network.count_network_faults(run).unit) == (40, "packets")
    assert network.count_network_faults(measured(WINDOW, [sample(at, nics=[nic(at)]) for at in TIMES])) is None


def test_pause_frames_and_faults_of_rdma_are_counted():
    """A driver may have only some of the counters. A metric has no value if no sample has one of its counters."""
    some = [sample(at, nics=[both(at, rx_pauses=3 * at, tx_priority_pauses=2 * at)]) for at in TIMES]
    found = FUNCTIONS["pause_frames"](measured(WINDOW, some))
    assert (found.value, found.unit) == (50, "frames")
    faulty = [
        sample(at, rdma=[RdmaSample(device="m", port=n, rx_errors=at * n, link_downed=1) for n in (1, 2)]) for at in TIMES
    ]
    found = FUNCTIONS["rdma_faults"](measured(WINDOW, faulty))
    assert (found.value, found.unit) == (30, "faults")
    neither = measured(WINDOW, [sample(at, nics=[both(at)], rdma=[port(at)]) for at in TIMES])
    assert FUNCTIONS["pause_frames"](neither) is FUNCTIONS["rdma_faults"](neither) is None


def test_packets_above_limits_of_the_cloud_and_retransmissions_are_counted():
    limited = [sample(at, nics=[both(at, tx_bandwidth_limited=2 * at, connections_limited=at)]) for at in TIMES]
    found = FUNCTIONS["limited_packets"](measured(WINDOW, limited))
    assert (found.value, found.unit) == (30, "packets")
    efa = [sample(at, rdma=[RdmaSample(device="e", port=1, retransmitted_packets=4 * at, rx_drops=at)]) for at in TIMES]
    run = measured(WINDOW, efa)
    assert (FUNCTIONS["rdma_retransmissions"](run).value, FUNCTIONS["rdma_faults"](run).value) == (40, 10)
    assert FUNCTIONS["limited_packets"](run) is None


def test_a_port_without_known_counters_is_trouble_of_the_telemetry():
    seen = [sample(at, rdma=[RdmaSample(device="new_0", port=2), port(at)]) for at in TIMES]
    assert covered(measured(WINDOW, seen)).trouble == "traffic of RDMA ports without known counters is not measured: new_0/2"


def linked(at, *sent, **more):
    gpus = [GpuSample(uuid=str(n), nvlink_tx_bytes=value, **more) for n, value in enumerate(sent)]
    return sample(at, gpus=gpus)


def test_bytes_over_nvlink_are_those_of_all_gpus_of_the_run():
    nvlink, pcie = (metric.of_run for metric in gpu_links.METRICS)
    run = measured(WINDOW, [linked(at, 1000 * at, 2000 * at) for at in TIMES])
    assert (nvlink(run).value, nvlink(run).unit) == (pytest.approx(30_000), "bytes")
    assert pcie(run) is None
    assert nvlink(measured(WINDOW, [linked(at, 1000 * at, None) for at in TIMES])) is None
    assert nvlink(measured(WINDOW, [linked(at, 1000 * at, played=True) for at in TIMES])) is None
    assert nvlink(measured(WINDOW, [linked(at, -1000 * at) for at in TIMES])) is None


def port(at, layer="InfiniBand", device="mlx5_0"):
    return RdmaSample(device=device, port=1, link_layer=layer, tx_bytes=1000 * at)


def test_rdma_is_counted_by_the_driver_or_by_the_port_and_never_by_both():
    by_port = [sample(at, nics=[both(at)], rdma=[port(at), port(at, device="mlx5_1")]) for at in TIMES]
    assert network.measure_rdma_bytes(measured(WINDOW, by_port)).value == pytest.approx(20_000)
    by_both = [sample(at, nics=[both(at, rdma_tx_bytes=7 * at)], rdma=[port(at, "Ethernet")]) for at in TIMES]
    assert network.measure_rdma_bytes(measured(WINDOW, by_both)).value == pytest.approx(70)
    mixed = [
        sample(at, nics=[both(at, rdma_tx_bytes=7 * at)], rdma=[port(at, "Ethernet"), port(at, device="ib0")]) for at in TIMES
    ]
    assert network.measure_rdma_bytes(measured(WINDOW, mixed)).value == pytest.approx(10_070)
    assert network.measure_rdma_bytes(measured(WINDOW, [sample(at, nics=[both(at)]) for at in TIMES])) is None


def idle(at, *watts, processes=0):
    gpus = [GpuSample(uuid=str(number), power_w=one, processes=processes) for number, one in enumerate(watts)]
    return sample(at, gpus=gpus)


def test_idle_power_is_that_before_the_first_process():
    before = [idle(1, 60.0, 70.0), idle(2, 62.0, 72.0)]
    after = [idle(t, 400.0, 500.0, processes=1) for t in (3, 9, 15, 21)] + [idle(25, 90.0, 90.0)]
    found = energy.measure_idle_power(measured(WINDOW, before + after))
    assert (found.value, found.unit) == (pytest.approx(61 + 71), "W")
    assert energy.measure_idle_power(measured(WINDOW, before[:1] + after)) is None
    assert energy.measure_idle_power(
        measured(WINDOW, before + after, result=msgspec.structs.replace(RESULT, gpus=["0", "1"]))
    ).value
    short = measured(WINDOW, before + after, result=msgspec.structs.replace(RESULT, gpus=["0", "1", "2"]))
    assert energy.measure_idle_power(short) is None


def test_the_summary_names_a_lost_gpu_and_a_sampler_that_died(tmp_path):
    workspace = Workspace(tmp_path)
    what = support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    folder = support.completed(workspace, what, rehearsal=False, gpu=True, found={"gpus": ["GPU-0", "GPU-7"]})
    with LineWriter(folder.samples_file(support.HOST)) as lines:
        at = support.START_S + 1.5
        gpus = [GpuSample(uuid="GPU-0", xids=[79]), GpuSample(uuid="GPU-7", lost=True)]
        lines.write_record(Sample(schema=1, t_s=2.5, wall_s=at, host=support.HOST, boot_id="boot", gpus=gpus))
    support.event(folder, SAMPLER_ENDED, 1, code=-9)
    loaded = load.load_matrix(workspace, None)
    found = summary.summarize(loaded, "ddp")
    (trouble,) = [remark for remark in found.remarks if remark.startswith("trouble of telemetry")]
    assert trouble.endswith("(its sampler ended 1 time while the run went on; GPUs were lost: GPU-7)")
    (run,) = found.rows[0].runs
    assert "GPU-7 was lost" in run.gpu_trouble
    (entry,) = found.telemetry
    assert (entry.sampler_ends, entry.lost_gpus) == (1, ["GPU-7"])


def test_differing_clocks_of_hosts_are_reported_unless_uncertain():
    run = measured(WINDOW, [sample(at) for at in TIMES])
    apart = {"a": {"start": ClockOffset(0.002, 0.001), "end": ClockOffset(-0.75, 0.002)}}
    entry = covered(run, clocks=apart)
    assert (entry.clock_start_s, entry.clock_end_s, entry.clock_within_s) == (0.002, -0.75, 0.002)
    assert entry.trouble == "its clock was 0.75 s from the clock of rank 0's host"
    assert covered(run, clocks={"a": {"end": ClockOffset(-0.75, 0.7)}}).trouble == ""
    assert covered(run, clocks={"b": apart["a"]}).clock_start_s is None


def test_clock_offsets_come_from_events_of_ranks_and_damaged_events_give_none(tmp_path):
    """The offset between clocks comes from events of the ranks. A damaged event is ignored."""
    workspace = Workspace(tmp_path)
    what = support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    folder = support.completed(workspace, what)
    support.event(folder, CLOCK_EVENT, 0, when="start", offset_s=0.5, within_s=0.01)
    support.event(folder, CLOCK_EVENT, 9, when="end", offset_s="much", within_s=0.01)
    support.event(folder, CLOCK_EVENT, 9, when=["end"], offset_s=1.0, within_s=0.01)
    (entry,) = summary.summarize(load.load_matrix(workspace, None), "ddp").telemetry
    assert (entry.clock_start_s, entry.clock_end_s, entry.clock_within_s) == (0.5, None, 0.01)


def test_the_processor_time_of_ranks_is_computed_from_their_step_records():
    ranks = {rank: [step(n, 1.0, wall_s=10.0 * n, cpu_s=5.0 + n * (4 + 4 * rank)) for n in (1, 2, 3)] for rank in (0, 1)}
    found = utilization.average_rank_cpu_utilization(measured(ranks))  # the ranks used 4 s and 8 s of processor time per 10 s
    assert (found.value, found.unit) == (pytest.approx(60), "%")
    ranks[1] = [msgspec.structs.replace(record, cpu_s=None) for record in ranks[1]]
    assert utilization.average_rank_cpu_utilization(measured(ranks)) is None
    again = {0: [step(n, 1.0, wall_s=10.0 * n, cpu_s=cpu_s) for n, cpu_s in ((1, 50.0), (2, 60.0), (3, 2.0))]}
    assert utilization.average_rank_cpu_utilization(measured(again)) is None
    assert utilization.average_rank_cpu_utilization(measured({0: [step(1, 1.0, cpu_s=1.0)]})) is None


def test_bytes_read_and_written_are_summed_over_ranks():
    read, written = (metric.of_run for metric in rank_io.METRICS)

    def ranks(*bytes_read):
        return {
            rank: [
                step(1, 1.0, disk_read_bytes=500, disk_write_bytes=7),
                step(2, 1.0, disk_read_bytes=found, disk_write_bytes=9),
            ]
            for rank, found in enumerate(bytes_read)
        }

    run = measured(ranks(700, 900))
    assert (read(run).value, read(run).unit, written(run).value) == (600, "bytes", 4)
    assert read(measured(ranks(700, 400))) is None  # the second rank was restarted
    assert read(measured({0: [step(1, 1.0), step(2, 1.0)]})) is None
