"""Metrics of the memory of the rank that needs the most memory."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.sources.steps import select_unwatched_steps

KIND_BY_MEMORY_COLUMN = {"allocated_bytes": "allocated on the GPU", "rss_bytes": "resident set of the process"}


def measure_peak_memory(run: LoadedRun) -> Quantity | None:
    """The largest memory over ranks and timed steps, in bytes: of the GPU allocator, or of the process if there is no GPU.

    None if only some of the step records are from a GPU, because the two kinds of memory cannot be compared.
    """
    steps = select_unwatched_steps(run.timed_steps)
    column = find_memory_column(steps)
    if column is None:
        return None
    return Quantity(_find_largest_bytes(steps[column]), "bytes", KIND_BY_MEMORY_COLUMN[column])


def find_memory_column(steps: pl.DataFrame) -> str | None:
    """The name of the column of `steps` that contains the memory of the ranks. The name is a key of KINDS.

    None if some step records have the memory of a GPU and others do not, or if no step record has a memory.
    """
    if 0 < steps["allocated_bytes"].null_count() < steps.height:
        return None
    return next((name for name in KIND_BY_MEMORY_COLUMN if steps[name].count()), None)


def measure_reserved_memory(run: LoadedRun) -> Quantity | None:
    """The largest memory that the GPU allocator had reserved, over ranks and timed steps, in bytes; None if a rank has no
    GPU."""
    reserved_bytes = select_unwatched_steps(run.timed_steps)["reserved_bytes"]
    if reserved_bytes.is_empty() or reserved_bytes.null_count():
        return None
    return Quantity(_find_largest_bytes(reserved_bytes), "bytes")


def _make_oom_size_reader(size_key: str) -> Callable[[LoadedRun], Quantity | None]:
    """A function that returns the largest size with this name over the ranks that saw that memory ran out; None if no rank
    recorded it."""

    def read_largest_size(run: LoadedRun) -> Quantity | None:
        recorded_sizes = [event.data.get(size_key) for event in run.events if event.event == "oom"]
        known_sizes = [size for size in recorded_sizes if isinstance(size, int)]
        return Quantity(max(known_sizes), "bytes") if known_sizes else None

    return read_largest_size


def _find_largest_bytes(memory_bytes: pl.Series) -> int:
    largest_bytes = memory_bytes.max()
    assert isinstance(largest_bytes, int)
    return largest_bytes


_HEADING_BY_KIND = {KIND_BY_MEMORY_COLUMN["allocated_bytes"]: "Peak GPU memory", KIND_BY_MEMORY_COLUMN["rss_bytes"]: "Peak RSS"}
METRICS = (
    Metric(
        name="peak_memory_bytes",
        column=MetricColumn("summary", 50, "Peak memory", headings=_HEADING_BY_KIND),
        unit="bytes",
        direction="lower is better",
        definition="Largest memory that the GPU allocator had allocated within a step, over ranks and timed steps; "
        "without a GPU, the largest resident set of a process after a step. The kind of each value is given with the value.",
        of_run=measure_peak_memory,
        reads=Reads(steps="timed"),
    ),
    Metric(
        name="reserved_memory_bytes",
        column=MetricColumn("memory", 100, "Reserved"),
        unit="bytes",
        direction="lower is better",
        definition="Largest memory that the GPU allocator had reserved within a step, over ranks and timed steps: "
        "allocated memory, and memory that the allocator keeps for later.",
        of_run=measure_reserved_memory,
        reads=Reads(steps="timed"),
    ),
    *(
        Metric(
            name=f"oom_{kind}_bytes",
            column=MetricColumn("memory", position, f"{kind.capitalize()} at OOM"),
            unit="bytes",
            direction="neither",
            definition=f"{description}, as the error says it; the largest over the ranks that saw the error.",
            of_run=_make_oom_size_reader(f"{kind}_bytes"),
            of_oom=True,
            reads=Reads(events=True),
        )
        for kind, position, description in (
            ("allocated", 110, "Memory that the GPU allocator had allocated when memory ran out"),
            ("reserved", 120, "Memory that the GPU allocator had reserved when memory ran out, with the allocated memory"),
            ("requested", 130, "Size of the allocation for which there was no memory"),
        )
    ),
)
