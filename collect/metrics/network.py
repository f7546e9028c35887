"""Metrics of the traffic of the hosts while steps were timed, from the kernel's counters of network interfaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial

import numpy as np
import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.loading.telemetry import compute_covered_pct
from collect.metric import Metric, MetricColumn, Reads
from collect.sources.device_rows import CounterValues, DeviceKey, DeviceRows
from collect.sources.samples import INTERFACE_KEYS

PAUSE_COUNTERS = ("rx_pauses", "tx_pauses", "rx_priority_pauses", "tx_priority_pauses")
PORT_COLUMNS = ("host", "device", "port")  # the columns that identify a port of an RDMA device
LIMIT_COUNTERS = ("rx_bandwidth_limited", "tx_bandwidth_limited", "packet_rate_limited", "connections_limited")
RDMA_FAULT_COUNTERS = ("rx_errors", "tx_discards", "link_downed", "rx_drops")
MIN_COVERED_SHARE = 0.8  # share of the timed window that the samples of an interface must cover


def measure_network_bytes(run: LoadedRun) -> Quantity | None:
    """Bytes sent by all hosts on their physical interfaces. For a host without physical interfaces, such as a container, the
    bytes sent on its virtual interfaces count."""
    return _sum_counter_growth(run, _select_counters(run.interfaces, choose_network_kind), "bytes")


def measure_received_bytes(run: LoadedRun) -> Quantity | None:
    """Bytes received by all hosts on the interfaces of which `measure_network_bytes` counts the sent bytes."""
    return _sum_counter_growth(run, _select_counters(run.interface_rows.get_counters("rx_bytes"), choose_network_kind), "bytes")


def count_network_faults(run: LoadedRun) -> Quantity | None:
    """Packets with errors and dropped packets, from the kernel's counters of the interfaces that `measure_network_bytes`
    uses."""
    nics = run.whole_samples.nics
    if nics["rx_errors"].null_count() == nics.height:  # records of an older release of shardlab do not have these counters
        return None
    fault_counts = nics.select(pl.sum_horizontal("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", ignore_nulls=False))
    fault_total = _sum_counter_growth(
        run, _select_counters(run.interface_rows.get_counters(fault_counts.to_series()), choose_network_kind), "packets"
    )
    return None if fault_total is None else Quantity(round(fault_total.value), "packets")


def _count_events(
    run: LoadedRun, samples: pl.DataFrame, device_columns: Sequence[str], counter_columns: Sequence[str], unit: str
) -> Quantity | None:
    """The growth of the counters `counter_columns` of all devices together; None if no sample has any of them. device_columns:
    the columns that identify a device."""
    samples = samples.filter(pl.any_horizontal(pl.col(*counter_columns).is_not_null()))
    if samples.is_empty():
        return None
    counters = DeviceRows(samples, device_columns).get_counters(samples.select(pl.sum_horizontal(*counter_columns)).to_series())
    growth_total = _sum_counter_growth(run, counters.values(), unit)
    return None if growth_total is None else Quantity(round(growth_total.value), unit)


def measure_rdma_bytes(run: LoadedRun) -> Quantity | None:
    """Bytes sent by RDMA: from the counters of the network driver if it has any (RoCE), else from the ports of RDMA devices.

    On a host whose driver has counters, the ports of RDMA devices on Ethernet are left out, because both counters may include
    the same bytes. An InfiniBand port is not a network interface, so its counter is always included.
    """
    nic_samples = run.whole_samples.nics
    if run.whole_samples.rdma.is_empty() and nic_samples["rdma_tx_bytes"].null_count() == nic_samples.height:
        return None
    nic_samples = nic_samples.drop_nulls("rdma_tx_bytes")
    port_samples = run.whole_samples.rdma.drop_nulls("tx_bytes")
    has_driver_counter = pl.col("host").is_in(nic_samples["host"].unique().to_list()) & (pl.col("link_layer") != "InfiniBand")
    port_samples = port_samples.filter(~has_driver_counter.fill_null(value=False))
    counter_groups = (
        DeviceRows(nic_samples, INTERFACE_KEYS).get_counters("rdma_tx_bytes"),
        DeviceRows(port_samples, PORT_COLUMNS).get_counters("tx_bytes"),
    )
    return _sum_counter_growth(run, [counter for counters in counter_groups for counter in counters.values()], "bytes")


def measure_loopback_bytes(run: LoadedRun) -> Quantity | None:
    """Bytes sent over loopback interfaces: the traffic between ranks of the same host, and between all other programs on the
    host."""
    return _sum_counter_growth(run, _select_counters(run.interfaces, lambda _: "loopback"), "bytes")


def choose_network_kind(interface_kinds: Set[str]) -> str:
    """The kind of the interfaces through which a host reaches other hosts: `physical`, or `virtual` if it has no physical
    interface.

    interface_kinds: all kinds of interfaces that the host has. A container has no physical interface.
    """
    return "physical" if "physical" in interface_kinds else "virtual"


def select_network_samples(nic_samples: pl.DataFrame) -> pl.DataFrame:
    """The samples of the interfaces through which a host reaches other hosts (`choose_network_kind`), chosen for each run and
    host."""
    physical = pl.col("kind") == "physical"
    return nic_samples.filter(pl.when(physical.any().over("run", "host")).then(physical).otherwise(pl.col("kind") == "virtual"))


def select_loopback_samples(nic_samples: pl.DataFrame) -> pl.DataFrame:
    """The samples of loopback interfaces."""
    return nic_samples.filter(pl.col("kind") == "loopback")


def _select_counters(
    interfaces: Mapping[DeviceKey, CounterValues], choose_kind: Callable[[Set[str]], str]
) -> list[CounterValues]:
    """The values of a counter of the interfaces of the wanted kind.

    interfaces: the values of the counter of each interface. choose_kind: a function that returns the wanted kind of interfaces
    of a host, given all kinds that the host has.
    """
    kinds_by_host: dict[str, set[str]] = {}
    for host, kind, _ in interfaces:
        kinds_by_host.setdefault(host, set()).add(kind)
    return [counter for (host, kind, _), counter in interfaces.items() if kind == choose_kind(kinds_by_host[host])]


def bound_sent_bytes(run: LoadedRun) -> tuple[float, float] | None:
    """Bounds of the bytes that all hosts sent on the interfaces of `measure_network_bytes` and `measure_loopback_bytes` while
    steps were timed.

    Returns (the smallest, the largest number of bytes that the samples of the counters allow).
    None if the bounds of any counter are not known, or if the run was on several hosts whose clocks were not compared.
    """
    if run.timed_window is None or run.clock_stepped or run.run is None:
        return None
    clock_spread_s = 0.0  # the largest difference between the clocks of two hosts, in seconds
    if run.run.world.nnodes > 1:
        if not run.clock_offsets:
            return None
        clock_offsets = [offset for offset_by_side in run.clock_offsets.values() for offset in offset_by_side.values()]
        clock_spread_s = max(abs(offset.offset_s) + offset.within_s for offset in clock_offsets)
    counters = [*_select_counters(run.interfaces, choose_network_kind), *_select_counters(run.interfaces, lambda _: "loopback")]
    bounds_of_counters = [bound_growth(counter, run.timed_window, clock_spread_s) for counter in counters]
    known_bounds = [bounds for bounds in bounds_of_counters if bounds is not None]
    if len(known_bounds) != len(bounds_of_counters):
        return None
    return (sum(lower_bound for lower_bound, _ in known_bounds), sum(upper_bound for _, upper_bound in known_bounds))


def bound_growth(counter: CounterValues, timed_window: tuple[float, float], apart_s: float = 0.0) -> tuple[int, int] | None:
    """Returns (lower bound, upper bound) of the growth of one counter within `timed_window`.

    apart_s: by how many seconds the edges of `timed_window` may be wrong.

    A counter only grows. A sample contains the time at which the sample began, and the counter is read after this time and
    before the next sample. So at any time, the counter is at most the value of the next sample, and at least the value of the
    second-last sample before this time.

    None if the counter went backwards, or if there are not enough samples before and after `timed_window`.
    """
    sample_times_s, counter_values, boot_ids = counter

    def find_samples_around(moment_s: float) -> tuple[int, int] | None:
        index_before = int(sample_times_s.searchsorted(moment_s - apart_s, "right")) - 2
        index_after = int(sample_times_s.searchsorted(moment_s + apart_s, "left"))
        return None if index_before < 0 or index_after == len(sample_times_s) else (index_before, index_after)

    indexes_at_start, indexes_at_end = find_samples_around(timed_window[0]), find_samples_around(timed_window[1])
    if indexes_at_start is None or indexes_at_end is None:
        return None
    rows_around_window = slice(indexes_at_start[0], indexes_at_end[1] + 1)
    if not _never_decreases(counter_values[rows_around_window], boot_ids[rows_around_window]):
        return None
    smallest_growth, largest_growth = (
        int(counter_values[last_index]) - int(counter_values[first_index])
        for last_index, first_index in ((indexes_at_end[0], indexes_at_start[1]), (indexes_at_end[1], indexes_at_start[0]))
    )
    return max(smallest_growth, 0), largest_growth


def _sum_counter_growth(run: LoadedRun, counters: Iterable[CounterValues], unit: str) -> Quantity | None:
    """The growth of all counters together while steps were timed; None if the growth of any counter is not known."""
    if run.timed_window is None or run.clock_stepped:
        return None
    growths = [measure_counter_growth(counter, run.timed_window) for counter in counters]
    known_growths = [growth for growth in growths if growth is not None]
    return Quantity(sum(known_growths), unit) if known_growths and len(known_growths) == len(growths) else None


def measure_counter_growth(counter: CounterValues, timed_window: tuple[float, float]) -> float | None:
    """The growth of one counter within `timed_window`; the values at both edges are interpolated between samples.

    None if the counter went backwards (reset, overflow, reboot), or if the samples cover less than LEAST_COVERAGE of the span.
    """
    all_times_s = counter.wall_s
    # The slice contains the samples within the span, the nearest sample before the span, and the nearest sample after the span.
    # If several samples have the same time as such a nearest sample, the slice contains all of them.
    index_before = int(all_times_s.searchsorted(timed_window[0], "right"))
    index_after = int(all_times_s.searchsorted(timed_window[1], "left"))
    first_index = int(all_times_s.searchsorted(all_times_s[index_before - 1], "left")) if index_before else 0
    last_index = (
        int(all_times_s.searchsorted(all_times_s[index_after], "right")) if index_after < len(all_times_s) else len(all_times_s)
    )
    times_s, counter_values, boot_ids = (column[first_index:last_index] for column in counter)
    if len(times_s) < 2 or not _never_decreases(counter_values, boot_ids):
        return None
    start_s, end_s = max(timed_window[0], float(times_s[0])), min(timed_window[1], float(times_s[-1]))
    if (
        end_s - start_s < MIN_COVERED_SHARE * (timed_window[1] - timed_window[0])
        or compute_covered_pct(times_s, timed_window) < 100 * MIN_COVERED_SHARE
    ):
        return None
    return _interpolate_counter(end_s, times_s, counter_values) - _interpolate_counter(start_s, times_s, counter_values)


def _never_decreases(counter_values: np.ndarray, boot_ids: np.ndarray) -> bool:
    """Whether a counter never went backwards, and the host was not started again."""
    return bool((counter_values[:-1] <= counter_values[1:]).all()) and bool((boot_ids == boot_ids[:1]).all())


def _interpolate_counter(moment_s: float, times_s: np.ndarray, counter_values: np.ndarray) -> float:
    """The interpolated value of a counter at a moment between the first and the last of `times_s`."""
    index_after = max(int(times_s.searchsorted(moment_s, "left")), 1)
    (before_s, after_s), (value_before, value_after) = (
        times_s[index_after - 1 : index_after + 1].tolist(),
        counter_values[index_after - 1 : index_after + 1].tolist(),
    )
    return float(value_before + (moment_s - before_s) / (after_s - before_s or 1) * (value_after - value_before))


_WHEN_COUNTED = "between the first and the last timed step. Blank as `network_bytes`, and where no counter is known."
_WHILE = (
    "between the first and the last timed step, from the kernel's counters, which count everything on the host. "
    "The counters are interpolated between samples at both ends. Blank if a counter went backwards, if the samples "
    "cover less than 80 % of this time, or if the clock of a host was set meanwhile."
)
_make_bytes_metric = partial(Metric, unit="bytes", direction="neither", reads=Reads(samples="window"))
_make_fault_metric = partial(Metric, direction="lower is better", reads=Reads(samples="window"))
METRICS = (
    _make_bytes_metric(
        name="network_bytes",
        column=MetricColumn("sent", 40, "All timed steps, network"),
        definition=f"Bytes sent by all hosts on physical interfaces (virtual ones if a host has no physical one) {_WHILE}",
        of_run=measure_network_bytes,
    ),
    _make_bytes_metric(
        name="network_received_bytes",
        column=MetricColumn("sent", 45, "All timed steps, network, received"),
        definition=f"Bytes received by all hosts on the interfaces of `network_bytes` {_WHILE}",
        of_run=measure_received_bytes,
    ),
    _make_bytes_metric(
        name="rdma_bytes",
        column=MetricColumn("sent", 47, "All timed steps, RDMA"),
        definition="Bytes sent by RDMA, which the kernel's counters do not include, by all hosts: by the network "
        "driver's counters, or those of the RDMA device if the driver has none. Otherwise as `network_bytes`.",
        of_run=measure_rdma_bytes,
    ),
    _make_fault_metric(
        name="network_faults",
        unit="packets",
        definition=f"Packets with errors and dropped packets, sent and received, on the interfaces of `network_bytes` {_WHILE}",
        of_run=count_network_faults,
    ),
    _make_fault_metric(
        name="pause_frames",
        unit="frames",
        definition="Pause frames (of the whole link, and of single traffic classes, which RoCE uses), sent and "
        f"received, by the counters of network drivers, {_WHEN_COUNTED}",
        of_run=lambda run: _count_events(run, run.whole_samples.nics, INTERFACE_KEYS, PAUSE_COUNTERS, "frames"),
    ),
    _make_fault_metric(
        name="rdma_faults",
        unit="faults",
        definition=f"Receive errors, discarded or dropped packets and link failures of all RDMA ports {_WHEN_COUNTED}",
        of_run=lambda run: _count_events(run, run.whole_samples.rdma, PORT_COLUMNS, RDMA_FAULT_COUNTERS, "faults"),
    ),
    _make_fault_metric(
        name="limited_packets",
        unit="packets",
        definition="Packets that the cloud delayed or dropped because a machine exceeded its limits of bytes, "
        f"packets or connections, by the counters of the network driver (ENA), {_WHEN_COUNTED}",
        of_run=lambda run: _count_events(run, run.whole_samples.nics, INTERFACE_KEYS, LIMIT_COUNTERS, "packets"),
    ),
    _make_fault_metric(
        name="rdma_retransmissions",
        unit="packets",
        definition=f"Packets that all ports of RDMA devices sent again, by the counters of EFA, {_WHEN_COUNTED}",
        of_run=lambda run: _count_events(run, run.whole_samples.rdma, PORT_COLUMNS, ("retransmitted_packets",), "packets"),
    ),
    _make_bytes_metric(
        name="loopback_bytes",
        column=MetricColumn("sent", 50, "All timed steps, loopback"),
        definition=f"Bytes sent over the loopback interfaces of all hosts {_WHILE}",
        of_run=measure_loopback_bytes,
    ),
)
