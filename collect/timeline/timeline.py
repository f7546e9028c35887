"""Builds the timeline of a run: steps, telemetry and events of all hosts, in times of the clock of the host of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from collect.loading.loaded_run import LoadedRun
from collect.timeline import straggler
from collect.timeline.clocks import HostClocks
from collect.timeline.straggler import Straggler
from collect.traces import run_traces, trace
from shardlab.runs import instrument_span
from shardlab.runs.instrument_span import InstrumentAct, InstrumentSpan
from shardlab.runs.record import Event

UNKNOWN_HOST = "host not recorded"


class RowSpans(msgspec.Struct, frozen=True):
    """The spans (such as steps or kernels) on one row of a timeline."""

    host: str
    """The host of the row."""
    row_name: str
    """The name of the row, such as `rank 0`."""
    names: list[str]
    """The name of each span."""
    start_s: NDArray[np.float64]
    """Start of each span, in seconds since the epoch; shape (number of names,)."""
    end_s: NDArray[np.float64]
    """End of each span, in seconds since the epoch; shape (number of names,)."""


class CounterTrack(msgspec.Struct, frozen=True):
    """A quantity of a host over time, such as the share of busy processors."""

    host: str
    name: str
    unit: str
    at_s: NDArray[np.float64]
    """The times of the values, in seconds since the epoch."""
    values: NDArray[np.float64]
    """The values in `unit`, with the same shape as `at_s`."""


class TimelineMoment(msgspec.Struct, frozen=True):
    """An event without a duration, such as the start of a run."""

    host: str
    name: str
    at_s: float
    """Its time, in seconds since the epoch."""


class RunTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one run."""

    run_id: str
    clocks: HostClocks
    uncorrected_hosts: list[str]
    """The hosts whose clocks were never compared; the times of these hosts are the times of their own clocks."""
    steps: list[RowSpans]
    instruments: list[RowSpans]
    """What instruments did between steps, such as saving checkpoints, in one row per rank."""
    counters: list[CounterTrack]
    moments: list[TimelineMoment]
    straggler: Straggler | None

    def find_host(self, rank: int) -> str:
        """The name of the host of a rank, or UNKNOWN_HOST."""
        return self.clocks.find_host(rank) or UNKNOWN_HOST


def build_timeline(run: LoadedRun) -> RunTimeline:
    """The timeline of a run, without the events of its traces, which `list_trace_spans` returns."""
    host_clocks = compare_host_clocks(run)
    counters = [*_list_host_counters(run, host_clocks)]
    hosts = {counter.host for counter in counters} | {host_clocks.find_host(rank) for rank in run.steps["rank"].unique()}
    return RunTimeline(
        run_id=run.run_id,
        clocks=host_clocks,
        uncorrected_hosts=sorted(host or UNKNOWN_HOST for host in hosts if not host_clocks.is_known(host)),
        steps=[*list_step_spans(run.steps, host_clocks)],
        instruments=[*list_instrument_spans(run.events, host_clocks)],
        counters=counters,
        moments=[
            TimelineMoment(event.host, event.event, float(host_clocks.correct_times(event.host, np.array([event.wall_s]))[0]))
            for event in run.events
            if event.event != instrument_span.INSTRUMENT_EVENT
        ],
        straggler=find_straggler(run),
    )


def list_trace_spans(run: LoadedRun) -> Iterator[RowSpans]:
    """The events in the traces of a run, as one `RowSpans` for each thread of a process and each stream of a GPU.

    A trace that does not say when it began, or to which rank it belongs, is left out.
    """
    host_clocks = compare_host_clocks(run)
    for trace_path in run_traces.select_regular_files((run.folder.path / "trace").glob("rank-*.json.gz")):
        recorded_trace = trace.read_trace(trace_path)
        if recorded_trace.base_ns is None or recorded_trace.rank is None:
            continue
        host = host_clocks.find_host(recorded_trace.rank)
        for thread_label in np.unique(recorded_trace.thread):
            event_indexes = np.flatnonzero(recorded_trace.thread == thread_label)
            start_s, end_s = (
                (recorded_trace.base_ns + ns[event_indexes]) / 1e9 for ns in (recorded_trace.start_ns, recorded_trace.end_ns)
            )
            yield RowSpans(
                host or UNKNOWN_HOST,
                f"rank {recorded_trace.rank} profiled: {recorded_trace.labels[thread_label]}",
                [recorded_trace.labels[name_label] for name_label in recorded_trace.name[event_indexes]],
                host_clocks.correct_times(host, start_s),
                host_clocks.correct_times(host, end_s),
            )


def find_straggler(run: LoadedRun) -> Straggler | None:
    """The straggler of a run. It is found in the traces of several ranks if there are any, else in the phases of the steps."""
    return straggler.find_straggler_by_traces(run.breakdowns) or straggler.find_straggler_by_phases(run.timed_steps)


def compare_host_clocks(run: LoadedRun) -> HostClocks:
    """The clocks of the hosts of a run."""
    return HostClocks(run.events, [host.host for host in run.hosts])


def list_step_spans(step_records: pl.DataFrame, host_clocks: HostClocks) -> Iterator[RowSpans]:
    """The steps of the ranks, one `RowSpans` per rank, sorted by time. step_records: the steps of the run
    (`LoadedRun.steps`)."""
    for (rank,), rank_steps in step_records.sort("rank", "wall_s").group_by("rank", maintain_order=True):
        host = host_clocks.find_host(int(rank))
        end_s = host_clocks.correct_times(host, rank_steps["wall_s"].to_numpy())
        start_s = end_s - rank_steps["step_ms"].to_numpy() / 1000
        step_flags = zip(rank_steps["step"], rank_steps["warmup"], rank_steps["watched"], strict=True)
        names = [f"{'warm-up ' * warm}step {n}{' (with an instrument)' * is_watched}" for n, warm, is_watched in step_flags]
        yield RowSpans(host or UNKNOWN_HOST, f"rank {rank}", names, start_s, end_s)


def list_instrument_spans(events: Iterable[Event], host_clocks: HostClocks) -> Iterator[RowSpans]:
    """What instruments did between steps, such as saving a checkpoint. One `RowSpans` per rank and host, sorted by rank."""
    spans_by_rank: dict[tuple[int, str], list[InstrumentSpan]] = {}
    for span in instrument_span.read_spans(events):
        spans_by_rank.setdefault((span.rank, span.host), []).append(span)
    for (rank, host), spans in sorted(spans_by_rank.items()):
        end_s = host_clocks.correct_times(host, np.array([span.end_s for span in spans]))
        start_s = end_s - np.array([span.act.seconds for span in spans])
        yield RowSpans(host, f"rank {rank} instruments", [label_act(span.act) for span in spans], start_s, end_s)


def label_act(act: InstrumentAct) -> str:
    """The name that the timeline shows for what an instrument did between steps, such as `checkpoint after step 4`."""
    return f"{'checkpoint' if act.name == 'checkpoints' else act.name} {act.when} step {act.step}"


def _list_host_counters(run: LoadedRun, host_clocks: HostClocks) -> Iterator[CounterTrack]:
    """The telemetry of all hosts: processors, memory, each GPU, and the rate of each network interface in MB/s."""

    def points(host: str, rows: pl.DataFrame, column: str, name: str, unit: str, scale: float = 1.0) -> Iterator[CounterTrack]:
        known_samples = rows.drop_nulls(column)
        if known_samples.height:
            at_s = host_clocks.correct_times(host, known_samples["wall_s"].to_numpy())
            yield CounterTrack(host, name, unit, at_s, known_samples[column].to_numpy() / scale)

    for (host,), rows in run.samples.hosts.group_by("host", maintain_order=True):
        yield from points(str(host), rows, "cpu_pct", "processors busy", "%")
        yield from points(str(host), rows, "memory_used_bytes", "memory in use", "GiB", 2**30)
    for (host, uuid, is_played), rows in run.samples.gpus.group_by("host", "uuid", "played", maintain_order=True):
        gpu_name = f"{uuid} (played)" if is_played else str(uuid)
        yield from points(str(host), rows, "utilization_pct", f"{gpu_name} utilization", "%")
        yield from points(str(host), rows, "power_w", f"{gpu_name} power", "W")
        yield from points(str(host), rows, "memory_used_bytes", f"{gpu_name} memory in use", "GiB", 2**30)
        yield from points(str(host), rows, "sm_clock_mhz", f"{gpu_name} SM clock", "MHz")
    for (host, name, _), rows in run.samples.nics.group_by("host", "name", "boot_id", maintain_order=True):
        for column, direction in (("tx_bytes", "sent"), ("rx_bytes", "received")):
            elapsed_s, growth = pl.col("wall_s").diff(), pl.col(column).diff()
            rates = rows.drop_nulls(column).with_columns(rate=pl.when(growth >= 0, elapsed_s > 0).then(growth / elapsed_s))
            yield from points(str(host), rates, "rate", f"{name} {direction}", "MB/s", 1e6)
