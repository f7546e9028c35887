"""Prints the tables of `collect trace` for data that only some traces contain: modules, memory, matrix products, attention."""

from __future__ import annotations

from collections.abc import Sequence

from collect import notation
from collect.traces import rank_sums
from collect.traces.answer_tables import MOST_ROWS, ms_text, number_text
from collect.traces.rank_analysis import RankAnalysis
from shardlab.terminal.console import Output

MOST_LAYERS = 40  # the most rows of the table of modules; the JSON document contains all modules
_LONGEST_NAME = 72  # the most characters of the name of a kernel; a longer name is cut


def print_detail_tables(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    """Print the tables for which the traces contain data. If data is missing, print one line that says how to record it."""
    _print_layers(output, ranks)
    _print_memory(output, ranks)
    _print_products(output, ranks)
    _print_attention(output, ranks)
    kinds = (
        ("modules", "stacks", any(analysis.layers for analysis in ranks)),
        ("memory", "memory", any(analysis.memory for analysis in ranks)),
        ("shapes of matrix products", "shapes", any(analysis.products for analysis in ranks)),
    )
    missing = [(data, option) for data, option, is_recorded in kinds if not is_recorded]
    if ranks and missing:
        output.print_line(
            f"not recorded: {', '.join(data for data, _ in missing)}. "
            f"`instruments: {{profile: {{{', '.join(f'{option}: true' for _, option in missing)}}}}}` records them."
        )


def _print_layers(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    layers = rank_sums.sum_layers(ranks)
    if not layers:
        return
    rows = [
        [
            f"{'  ' * min(layer.depth, 12)}{layer.name}",
            f"{layer.calls:,}",
            ms_text(layer.forward),
            ms_text(layer.backward),
            ms_text(layer.communication_ns),
            ms_text(layer.forward_host_ns),
            ms_text(layer.backward_host_ns),
        ]
        for layer in layers[:MOST_LAYERS]
    ]
    omitted_note = f"; {len(layers) - MOST_LAYERS} more in --json" if len(layers) > MOST_LAYERS else ""
    columns = ["Module", "Calls (n)", "Forward (ms)", "Backward (ms)", "Communication (ms)", "Host, forward (ms)"]
    output.print_table(
        f"modules with all that they call, all ranks together{omitted_note}", [*columns, "Host, backward (ms)"], rows
    )


def _print_memory(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    rows = [
        [
            "" if analysis.rank is None else str(analysis.rank),
            use.device,
            *(_mib_text(size) for size in (use.start_bytes, use.end_bytes, use.peak_bytes, use.peak_reserved_bytes)),
        ]
        for analysis in ranks
        for use in analysis.memory
    ]
    if rows:
        columns = ["Rank", "Device", "At the start (MiB)", "At the end (MiB)", "Peak (MiB)", "Peak reserved (MiB)"]
        on_cpu = any(use.device == "cpu" for analysis in ranks for use in analysis.memory)
        note = "; cpu: since the recording began" if on_cpu else ""
        output.print_table(f"memory of the allocators in the profiled steps{note}", columns, rows)


def _print_products(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    products = rank_sums.sum_products(ranks)
    if not products:
        return
    rows = [
        [
            product.operator,
            *(f"{size:,}" for size in (product.batch, product.m, product.n, product.k, product.calls)),
            ms_text(product.total_ns),
            number_text(None if product.flops_per_s is None else product.flops_per_s / 1e12),
        ]
        for product in products[:MOST_ROWS]
    ]
    total, time = sum(product.flops for product in products), sum(product.total_ns for product in products)
    achieved = f": {notation.format_number(total / time / 1000)} TFLOP/s" if time else ""
    omitted_note = f"; {len(products) - MOST_ROWS} more in --json" if len(products) > MOST_ROWS else ""
    columns = ["Operator", "Batch", "M", "N", "K", "Calls (n)", "Time (ms)", "TFLOP/s"]
    output.print_table(f"matrix products, all ranks together{achieved}{omitted_note}", columns, rows)
    if untimed := sum(product.untimed for product in products):
        output.print_line(f"{untimed:,} more products have no recorded kernels, so their time is not known.")


def _print_attention(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    uses = rank_sums.sum_attention(ranks)
    if not uses:
        return
    rows = [
        [
            use.backend,
            "backward" if use.backward else "forward",
            _shorten(use.name),
            _shorten(", ".join(use.kernels)) if use.by == "operator" else "",
            f"{use.calls:,}",
            ms_text(use.total_ns),
        ]
        for use in uses[:MOST_ROWS]
    ]
    omitted_note = f"; {len(uses) - MOST_ROWS} more in --json" if len(uses) > MOST_ROWS else ""
    columns = ["Attention", "Pass", "Operator or kernel", "Its kernels", "Calls (n)", "Time (ms)"]
    output.print_table(f"attention, all ranks together{omitted_note}", columns, rows)


def _mib_text(size: int | None) -> str:
    return "" if size is None else notation.format_number(size / notation.MIB)


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
