"""Prints the tables of `collect trace` for data that only some traces contain: modules, memory, matrix products, attention."""

from __future__ import annotations

from collections.abc import Sequence

from collect import notation
from collect.traces import rank_sums
from collect.traces.answer_tables import SHOWN, ms, number
from collect.traces.rank_analysis import RankAnalysis
from shardlab.terminal.console import Output

MOST_LAYERS = 40  # the most rows of the table of modules; the JSON document contains all modules
_LONGEST = 72  # the most characters of the name of a kernel; a longer name is cut


def show(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    """Print the tables for which the traces contain data. If data is missing, print one line that says how to record it."""
    _layers(output, ranks)
    _memory(output, ranks)
    _products(output, ranks)
    _attention(output, ranks)
    options = (
        ("modules", "stacks", any(one.layers for one in ranks)),
        ("memory", "memory", any(one.memory for one in ranks)),
        ("shapes of matrix products", "shapes", any(one.products for one in ranks)),
    )
    missing = [(what, option) for what, option, known in options if not known]
    if ranks and missing:
        output.line(
            f"not recorded: {', '.join(what for what, _ in missing)}. "
            f"`instruments: {{profile: {{{', '.join(f'{option}: true' for _, option in missing)}}}}}` records them."
        )


def _layers(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    found = rank_sums.layers(ranks)
    if not found:
        return
    rows = [
        [
            f"{'  ' * min(one.depth, 12)}{one.name}",
            f"{one.calls:,}",
            ms(one.forward),
            ms(one.backward),
            ms(one.communication_ns),
            ms(one.forward_host_ns),
            ms(one.backward_host_ns),
        ]
        for one in found[:MOST_LAYERS]
    ]
    more = f"; {len(found) - MOST_LAYERS} more in --json" if len(found) > MOST_LAYERS else ""
    columns = ["Module", "Calls (n)", "Forward (ms)", "Backward (ms)", "Communication (ms)", "Host, forward (ms)"]
    output.table(f"modules with all that they call, all ranks together{more}", [*columns, "Host, backward (ms)"], rows)


def _memory(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    rows = [
        [
            "" if one.rank is None else str(one.rank),
            use.device,
            *(_mib(size) for size in (use.start_bytes, use.end_bytes, use.peak_bytes, use.peak_reserved_bytes)),
        ]
        for one in ranks
        for use in one.memory
    ]
    if rows:
        columns = ["Rank", "Device", "At the start (MiB)", "At the end (MiB)", "Peak (MiB)", "Peak reserved (MiB)"]
        on_cpu = any(use.device == "cpu" for one in ranks for use in one.memory)
        note = "; cpu: since the recording began" if on_cpu else ""
        output.table(f"memory of the allocators in the profiled steps{note}", columns, rows)


def _products(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    found = rank_sums.products(ranks)
    if not found:
        return
    rows = [
        [
            one.operator,
            *(f"{size:,}" for size in (one.batch, one.m, one.n, one.k, one.calls)),
            ms(one.total_ns),
            number(None if one.flops_per_s is None else one.flops_per_s / 1e12),
        ]
        for one in found[:SHOWN]
    ]
    total, time = sum(one.flops for one in found), sum(one.total_ns for one in found)
    achieved = f": {notation.number(total / time / 1000)} TFLOP/s" if time else ""
    more = f"; {len(found) - SHOWN} more in --json" if len(found) > SHOWN else ""
    columns = ["Operator", "Batch", "M", "N", "K", "Calls (n)", "Time (ms)", "TFLOP/s"]
    output.table(f"matrix products, all ranks together{achieved}{more}", columns, rows)
    if untimed := sum(one.untimed for one in found):
        output.line(f"{untimed:,} more products have no recorded kernels, so their time is not known.")


def _attention(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    found = rank_sums.attention(ranks)
    if not found:
        return
    rows = [
        [
            one.backend,
            "backward" if one.backward else "forward",
            _short(one.name),
            _short(", ".join(one.kernels)) if one.by == "operator" else "",
            f"{one.calls:,}",
            ms(one.total_ns),
        ]
        for one in found[:SHOWN]
    ]
    more = f"; {len(found) - SHOWN} more in --json" if len(found) > SHOWN else ""
    columns = ["Attention", "Pass", "Operator or kernel", "Its kernels", "Calls (n)", "Time (ms)"]
    output.table(f"attention, all ranks together{more}", columns, rows)


def _mib(size: int | None) -> str:
    return "" if size is None else notation.number(size / notation.MIB)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
