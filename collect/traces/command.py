"""`collect trace`: how the profiled steps of a run spend their time, and how its operators differ from those of another run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from collect import notation
from collect.traces import answer_tables, hta, run_answers, run_traces
from collect.traces import trace as source
from collect.traces.breakdown import Breakdown, EventTally, breakdown
from collect.traces.difference import difference
from collect.traces.operators import OperatorDifference, differences
from collect.traces.rank_analysis import RankAnalysis, analyse
from collect.traces.run_answers import RunAnswers
from collect.traces.trace import Trace
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.workspace import Workspace

_SHOWN = 12  # rows of a table of operators; all of them are in the JSON document
_MS = 1e6  # ns
_FIGURES = ("exposed_communication_ns", "overlap_pct")


def files(workspace: Workspace, run: str) -> list[Path]:
    """The traces of a run, or of a folder or file if the name has a slash. Raises InputError if there are none."""
    named = "/" in run
    folder = Path(run) if named else workspace.run(run).path / "trace"
    inside = [path for path in folder.glob("*.json*") if not path.name.startswith(".")]
    found = [folder] if named and folder.is_file() else sorted(inside) if named else run_traces.regular(inside)
    if not found:
        raise InputError(
            f"{folder}: no traces. Allowed: a run whose cell has instruments: {{profile: ...}}, "
            "or a folder or file (with a slash in its name) of Chrome traces, *.json or *.json.gz."
        )
    return found


def show(workspace: Workspace, run: str, against: str | None, output: Output, *, like_hta: bool) -> int:
    """Print tables or the document. Returns 1 if a trace is damaged; then the figures are of the events that could be read."""
    paths, other_paths = files(workspace, run), files(workspace, against) if against else []
    traces = [source.read(path) for path in paths]
    told = hta.breakdowns(traces) if like_hta else [found for trace in traces if (found := breakdown(trace))]
    others = [source.read(path) for path in other_paths]
    differ = differences(traces, others) if against else []
    answers = None if like_hta else RunAnswers(_analyses(traces))
    why = difference([answers], [RunAnswers(_analyses(others))]) if answers and against else None
    damage = [f"{trace.path}: {sentence}" for trace in (*traces, *others) for sentence in damages(trace)]
    _tables(output, run, told, like_hta=like_hta)
    if answers is None:
        _tallies(output, "collectives, all ranks together", "Collective", [one for each in told for one in each.collectives])
    else:
        answer_tables.show(output, answers)
    _tallies(
        output,
        "kernels (on CPU: operators including all that they call), all ranks together",
        "Name",
        [one for each in told for one in each.kernels],
    )
    if against and why:
        answer_tables.why(output, run, against, why)
    if against:
        _operators(output, run, against, differ)
    if sentence := _unstable(told):
        output.remark(sentence)
    for trace in traces:
        if not len(trace.name):
            output.remark(f"{trace.path}: the trace has no events.", style="yellow")
    for sentence in damage:
        output.remark(sentence, style="red")
    ranks = [_document(one) for one in told]
    document: dict[str, Any] = {"run": run, "like_hta": like_hta, "ranks": ranks, "damage": damage}
    if answers is not None:
        document["ranks"] = [one | run_answers.of_rank(rank) for one, rank in zip(ranks, answers.ranks, strict=True)]
        document |= answers.document()
    output.document(document | ({"against": against, "why": why, "operators": differ} if against else {}))
    return 1 if damage else 0


def _analyses(traces: Sequence[Trace]) -> list[RankAnalysis]:
    return [found for trace in traces if (found := analyse(trace))]


def _unstable(told: Sequence[Breakdown]) -> str:
    """How far HolisticTraceAnalysis may differ from these figures because its sort is unstable; nothing if it may not."""
    idle = [one.hta_bounds.idle_ns for one in told if one.hta_bounds is not None]
    most_us = max((high - low for low, high in idle), default=0) // 1000
    if not most_us:
        return ""
    return (
        f"HolisticTraceAnalysis itself may give up to {most_us} us more or less idle time for a rank: it sorts kernels with "
        "equal rounded starts in an order that depends on the processor (`hta_bounds` in --json)."
    )


def damages(trace: Trace) -> list[str]:
    """What is wrong with a trace, a sentence each."""
    found = [f"{count:,} events lost: {reason}" for reason, count in trace.lost.items()]
    return [*found, *([f"cut short: {trace.cut}"] if trace.cut else [])]


def _document(one: Breakdown) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(one)
    for rows, tallies in ((built["collectives"], one.collectives), (built["kernels"], one.kernels)):
        for row, each in zip(rows, tallies, strict=True):
            row["mean_ns"] = each.mean_ns
    return built | {name: getattr(one, name) for name in _FIGURES}


def _tables(output: Output, run: str, told: Sequence[Breakdown], *, like_hta: bool) -> None:
    by = "as HolisticTraceAnalysis rounds: whole microseconds, without the last profiler step" if like_hta else "exact"
    headings = ["Rank", "Source", "Steps", "Span (ms)", "Compute (ms)", "Communication (ms)", "Memory (ms)", "Non-compute (ms)"]
    headings += ["Idle (ms)", "Idle (%)", "Overlap (%)", "Exposed communication (ms)"]
    rows = [
        [
            "" if one.rank is None else str(one.rank),
            one.source,
            str(one.steps),
            *(_ms(ns) for ns in (one.span_ns, one.compute_ns, one.communication_ns, one.memory_ns, one.non_compute_ns)),
            _ms(one.idle_ns),
            f"{100 * one.idle_ns / one.span_ns:.2f}" if one.span_ns else "",
            "" if one.overlap_pct is None else f"{one.overlap_pct:.2f}",
            _ms(one.exposed_communication_ns),
        ]
        for one in told
    ]
    output.table(f"{run} ({by})", headings, rows)
    output.line("non-compute: something runs but nothing computes (exposed communication and exposed memory operations).")


def _tallies(output: Output, title: str, heading: str, tallies: Sequence[EventTally]) -> None:
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in tallies:
        totals[one.name][0] += one.count
        totals[one.name][1] += one.total_ns
    rows = sorted(totals.items(), key=lambda item: -item[1][1])
    shown = [[_short(name), f"{n:,}", _ms(ns), notation.number(ns / n / 1000)] for name, (n, ns) in rows[:_SHOWN]]
    if shown:
        more = f"; {len(rows) - _SHOWN} more in --json" if len(rows) > _SHOWN else ""
        output.table(f"{title}{more}", [heading, "Calls (n)", "Total (ms)", "Mean (us)"], shown)


def _operators(output: Output, run: str, against: str, differ: Sequence[OperatorDifference]) -> None:
    chosen = [one for one in differ if one.change != "same"]
    rows = [
        [
            one.change,
            one.kind,
            _short(one.name),
            *(notation.number(calls) for calls in (one.calls, one.against_calls)),
            *(_ms(ns) for ns in (one.time_ns, one.against_time_ns, one.more_time_ns)),
        ]
        for one in chosen[:_SHOWN]
    ]
    counts = ", ".join(
        f"{sum(one.change == change for one in differ)} {change}" for change in ("new", "gone", "changed", "same")
    )
    more = f"; {len(chosen) - _SHOWN} more in --json" if len(chosen) > _SHOWN else ""
    columns = ["Change", "Kind", "Name", "Calls (n)", "Against (n)", "Time (ms)", "Against (ms)", "Difference (ms)"]
    output.table(f"{run} against {against}, per step and rank: {counts}{more}", columns, rows)


def _ms(ns: float | None) -> str:
    return "" if ns is None else notation.number(ns / _MS)


def _short(name: str) -> str:
    """Kernels are templates whose names run over hundreds of characters."""
    return name if len(name) <= 72 else f"{name[:71]}…"
