"""The tables of `collect trace`: how a run spends its profiled steps, and why a step takes as long as it does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collect.traces import attention, change_tables, layers, matrix_products
from collect.traces.answer_columns import (
    ACHIEVED_FLOPS_COLUMN,
    ATTENTION_COLUMNS,
    BANDWIDTH_COLUMNS,
    MOST_ROWS,
    SIZE_COLUMNS,
    make_bound_column,
    make_mib_column,
    make_ms_column,
    make_name_column,
    make_us_column,
)
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.operators import OperatorDifference, make_operator_columns
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.rank_work import sum_work
from collect.traces.run_answers import RunAnswers
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.terminal.table import Column, Table

Entry = TypeVar("Entry")
_UNKNOWN_CAUSES_NOTE = "idle time by cause: the traces hold no calls that launch kernels, so the causes are not known."
_ALL_RANKS_TEXT = "all ranks together"
# of rows that are pairs of a rank and one of its entries
_RANK_COLUMN: Column[Any] = Column("Rank", lambda row: row[0].file if row[0].rank is None else row[0].rank)


def print_answer_tables(output: Output, answers: RunAnswers) -> None:
    """Print the tables that explain the time of a step. Where data is missing, a line says so, or says how to record it."""
    ranks = answers.ranks
    waits_table, idle_table = make_waits_table(answers), make_idle_table(ranks)
    answer_tables = (
        *change_tables.make_work_tables(sum_work(analysis.work for analysis in ranks)),
        *(make_collectives_table(answers), waits_table, idle_table, make_phases_table(ranks)),
        *(make_layers_table(ranks), make_memory_table(ranks), make_products_table(ranks), make_attention_table(ranks)),
    )
    for answer_table in answer_tables:
        if answer_table.rows:
            output.show_table(answer_table)
        if answer_table.note:
            output.print_line(answer_table.note)
    _print_missing_details(output, ranks)


def _print_missing_details(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    detail_kinds = (
        ("modules", "stacks", any(analysis.layers for analysis in ranks)),
        ("memory", "memory", any(analysis.memory for analysis in ranks)),
        (
            "shapes and types of inputs",
            "shapes",
            any(analysis.is_bound or any(row.shapes for row in analysis.work.operators) for analysis in ranks),
        ),
    )
    missing_kinds = [(detail_name, option) for detail_name, option, is_recorded in detail_kinds if not is_recorded]
    if ranks and missing_kinds:
        output.print_line(
            f"not recorded: {', '.join(detail_name for detail_name, _ in missing_kinds)}. "
            f"`instruments: {{profile: {{{', '.join(f'{option}: true' for _, option in missing_kinds)}}}}}` records them."
        )


def make_collectives_table(answers: RunAnswers) -> Table[Any]:
    """The collectives by process group, the longest total time first."""
    collective_uses = answers.collectives
    table_columns: list[Column[Any]] = [
        Column("Collective", lambda use: use.collective),
        Column("Process group", lambda use: answers.group_labels[use.group], is_number=False),
        Column("Profiled", lambda use: f"{use.profiled} of {use.group.size}" if use.group.size else None, is_number=True),
        Column("Calls", lambda use: use.calls),
        make_mib_column("Message", lambda use: None if use.message_bytes is None else use.message_bytes / use.calls),
        make_mib_column("Sent", lambda use: use.sent_bytes),
        make_ms_column("Total", lambda use: use.total_ns),
        make_us_column("Mean", lambda use: use.total_ns / use.calls),
        make_us_column("Transfer", lambda use: None if use.transfer_ns is None else use.transfer_ns / use.calls),
        *BANDWIDTH_COLUMNS,
        Column("Of link", lambda use: use.link_pct, "%"),
    ]
    are_sizes_known = all(use.message_bytes is not None for use in collective_uses)
    note = "blank bandwidth: the trace does not record the elements or the process group of each call."
    table_title = f"collectives by process group, {_ALL_RANKS_TEXT}"
    return Table(table_title, table_columns, collective_uses, note="" if are_sizes_known else note, most_rows=MOST_ROWS)


def make_waits_table(answers: RunAnswers) -> Table[Any]:
    """How long each rank waited for slow ranks. Without rows, the note says why this is not known."""
    waits = answers.waits
    table_columns: list[Column[Any]] = [
        Column("Rank", lambda rank_wait: rank_wait.rank),
        Column("Calls", lambda rank_wait: rank_wait.calls),
        Column("Started last", lambda rank_wait: rank_wait.last),
        make_ms_column("Waited", lambda rank_wait: rank_wait.waited_ns),
        make_ms_column("Lost", lambda rank_wait: rank_wait.lost_ns),
        Column("Lost", lambda rank_wait: rank_wait.lost_pct, "%"),
        make_ms_column("Others waited for it", lambda rank_wait: rank_wait.caused_ns),
    ]
    if waits.missing_reason:
        note = f"waiting for slow ranks: not known, because {waits.missing_reason}." if answers.collectives else ""
        return Table("", table_columns, [], note=note)
    straggler = waits.straggler
    lost_pct_text = "" if waits.lost_pct is None else notation.format_number(waits.lost_pct)
    table_title = f"waiting for slow ranks: {lost_pct_text} % of the time is lost"
    profiled_text = " of the profiled ranks" if waits.is_partial else ""
    table_title += f"; rank {straggler.rank} lets the others wait the longest{profiled_text}" if straggler else ""
    note = f"{waits.unmatched_count:,} calls are not matched over ranks: the ranks of the group called others in that step."
    return Table(table_title, table_columns, waits.ranks, note=note if waits.unmatched_count else "")


def make_idle_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The idle time of each rank by cause. Without rows, the note says if the causes of idle time are not known."""
    idle_rows = [(analysis, analysis.idle, analysis.launches) for analysis in ranks if analysis.idle is not None]
    table_columns: list[Column[Any]] = [
        _RANK_COLUMN,
        make_ms_column("Idle", lambda row: row[0].idle_ns),
        make_ms_column("Host launched nothing", lambda row: row[1].host_ns),
        make_ms_column("In launching calls", lambda row: row[1].launching_ns if row[0].kind == "gpu" else None),
        make_ms_column("Waiting for communication", lambda row: row[1].communication_ns),
        make_ms_column("Other", lambda row: row[1].other_ns),
        make_us_column("Launch delay, median", lambda row: None if row[2] is None else row[2].median_ns),
        make_us_column("Launch delay, longest", lambda row: None if row[2] is None else row[2].longest_ns),
    ]
    has_unknown_causes = not idle_rows and any(analysis.idle_ns for analysis in ranks)
    return Table("idle time by cause", table_columns, idle_rows, note=_UNKNOWN_CAUSES_NOTE if has_unknown_causes else "")


def make_phases_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The phases of each rank."""
    columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Phase", lambda row: row[1].phase),
        make_ms_column("Host", lambda row: row[1].host_ns),
        make_ms_column("GPU", lambda row: row[1].device_ns),
        make_ms_column("Compute", lambda row: row[1].compute_ns),
        make_ms_column("Communication", lambda row: row[1].communication_ns),
    ]
    return Table("phases of the steps, by what launched the work", columns, _pair_with_rank(ranks, lambda rank: rank.phases))


def make_layers_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The modules of the model as a tree, the longest first."""
    table_columns: list[Column[Any]] = [
        Column("Module", lambda layer: f"{'  ' * min(layer.depth, 12)}{layer.name}", is_number=False),
        Column("Calls", lambda layer: layer.calls),
        make_ms_column("Forward", lambda layer: layer.forward),
        make_ms_column("Backward", lambda layer: layer.backward),
        make_ms_column("Communication", lambda layer: layer.communication_ns),
        make_ms_column("Host, forward", lambda layer: layer.forward_host_ns),
        make_ms_column("Host, backward", lambda layer: layer.backward_host_ns),
    ]
    layer_sums = layers.sum_layers(layer for rank in ranks for layer in rank.layers)
    table_title = f"modules with all that they call, {_ALL_RANKS_TEXT}"
    return Table(table_title, table_columns, layer_sums, most_rows=layers.count_shown_layers(layer_sums))


def make_memory_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The memory of each device of each rank."""
    table_columns: list[Column[Any]] = [
        _RANK_COLUMN,
        Column("Device", lambda row: row[1].device),
        make_mib_column("At the start", lambda row: row[1].start_bytes),
        make_mib_column("At the end", lambda row: row[1].end_bytes),
        make_mib_column("Peak", lambda row: row[1].peak_bytes),
        make_mib_column("Peak reserved", lambda row: row[1].peak_reserved_bytes),
    ]
    memory_rows = _pair_with_rank(ranks, lambda rank: rank.memory)
    has_cpu_memory = any(use.device == "cpu" for _, use in memory_rows)
    title = f"memory of the allocators in the profiled steps{'; cpu: since the recording began' if has_cpu_memory else ''}"
    return Table(title, table_columns, memory_rows)


def make_products_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The matrix products, the longest time first."""
    products = matrix_products.sum_products(product for rank in ranks for product in rank.products)
    total_flops, total_ns = sum(product.flops for product in products), sum(product.total_ns for product in products)
    achieved_text = f": {notation.format_number(total_flops / total_ns / 1000)} TFLOP/s" if total_ns else ""
    untimed_count = sum(product.untimed for product in products)
    note = f"{untimed_count:,} more products have no recorded kernels, so their time is not known." if untimed_count else ""
    columns = (
        *(*SIZE_COLUMNS, make_ms_column("Time", lambda product: product.total_ns)),
        *(make_ms_column("Copies", lambda product: product.copy_ns), ACHIEVED_FLOPS_COLUMN),
    )
    return Table(f"matrix products, {_ALL_RANKS_TEXT}{achieved_text}", columns, products, note=note, most_rows=MOST_ROWS)


def make_attention_table(ranks: Sequence[RankAnalysis]) -> Table[Any]:
    """The implementations of attention, the longest time first."""
    attention_uses = attention.sum_attention(use for rank in ranks for use in rank.attention)
    columns = (*ATTENTION_COLUMNS, make_ms_column("Time", lambda use: use.total_ns))
    return Table(f"attention, {_ALL_RANKS_TEXT}", columns, attention_uses, most_rows=MOST_ROWS)


def make_breakdown_table(run: str, breakdowns: Sequence[Breakdown], *, like_hta: bool) -> Table[Breakdown]:
    """The time of each rank by what it does. like_hta: whether the times are rounded as HolisticTraceAnalysis rounds them."""
    rounding_text = (
        "as HolisticTraceAnalysis rounds: whole microseconds, without the last profiler step" if like_hta else "exact"
    )
    columns: list[Column[Breakdown]] = [
        Column("Rank", lambda breakdown: breakdown.rank),
        Column("File", lambda breakdown: breakdown.file, is_number=False, priority=1),
        Column("Source", lambda breakdown: breakdown.source),
        Column("Steps", lambda breakdown: breakdown.steps),
        make_bound_column("Span", "span_ns"),
        make_bound_column("Compute", "compute_ns"),
        make_bound_column("Communication", "communication_ns"),
        make_bound_column("Memory", "memory_ns"),
        make_bound_column("Non-compute", "non_compute_ns"),
        make_bound_column("Idle", "idle_ns"),
        Column("Idle", lambda breakdown: None if "idle_ns" in breakdown.bounds else breakdown.idle_pct, "%"),
        Column("Overlap", lambda breakdown: None if "overlap_ns" in breakdown.bounds else breakdown.overlap_pct, "%"),
        make_bound_column("Exposed communication", "exposed_communication_ns"),
    ]
    note = "non-compute: something runs but nothing computes (exposed communication and exposed memory operations)."
    return Table(f"{run} ({rounding_text})", columns, breakdowns, note=note)


def make_devices_table(breakdowns: Sequence[Breakdown]) -> Table[Any]:
    """The time of each GPU of the ranks that used several."""
    columns: list[Column[Any]] = [
        Column("Rank", lambda row: row[0].file if row[0].rank is None else row[0].rank),
        Column("Device", lambda row: f"GPU {row[1].device}", is_number=False),
        make_ms_column("Compute", lambda row: row[1].compute_ns),
        make_ms_column("Communication", lambda row: row[1].communication_ns),
        make_ms_column("Memory", lambda row: row[1].memory_ns),
        make_ms_column("Idle", lambda row: row[1].idle_ns),
    ]
    device_rows = [(breakdown, device) for breakdown in breakdowns for device in breakdown.devices]
    return Table("devices of the ranks with several GPUs", columns, device_rows)


def make_tally_table(table_title: str, heading: str, tallies: Sequence[EventTally]) -> Table[EventTally]:
    """The events by name, the longest total time first. heading: the heading of the names."""
    count_by_name, total_ns_by_name = Counter[str](), defaultdict[str, int](int)
    for tally in tallies:
        count_by_name[tally.name] += tally.count
        total_ns_by_name[tally.name] += tally.total_ns
    summed_tallies = [
        EventTally(name, count_by_name[name], ns) for name, ns in sorted(total_ns_by_name.items(), key=lambda item: -item[1])
    ]
    table_columns: list[Column[EventTally]] = [
        make_name_column(heading, lambda tally: tally.name),
        Column("Calls", lambda tally: tally.count),
        make_ms_column("Total", lambda tally: tally.total_ns),
        make_us_column("Mean", lambda tally: tally.mean_ns),
    ]
    return Table(f"{table_title}, {_ALL_RANKS_TEXT}", table_columns, summed_tallies, most_rows=MOST_ROWS)


def make_operators_table(run: str, other_run: str, differences: Sequence[OperatorDifference]) -> Table[OperatorDifference]:
    """The operators that only one of two runs calls, or that they call a different number of times."""
    count_by_change = Counter(difference.change for difference in differences)
    counts_text = ", ".join(f"{count_by_change[change]} {change}" for change in ("new", "gone", "changed", "same"))
    changed_operators = [difference for difference in differences if difference.change != "same"]
    table_title = f"{run} against {other_run}, per step and rank: {counts_text}"
    return Table(table_title, make_operator_columns("against"), changed_operators, most_rows=MOST_ROWS)


def _pair_with_rank(
    ranks: Sequence[RankAnalysis], get_entries: Callable[[RankAnalysis], Sequence[Entry]]
) -> list[tuple[RankAnalysis, Entry]]:
    """The entries of all ranks, each with its rank."""
    return [(rank, entry) for rank in ranks for entry in get_entries(rank)]
