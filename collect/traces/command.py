"""`collect trace`: shows how a run spends its profiled steps, and how its operators differ from those of another run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collect import notation
from collect.traces import answer_tables, detail_tables, hta, merged, run_answers, run_traces
from collect.traces import trace as source
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.difference import StepDifference, difference
from collect.traces.file_figures import FileFigures, damages, file_figures, in_order, order
from collect.traces.operators import OperatorDifference, differences
from collect.traces.run_answers import RunAnswers
from collect.traces.trace import Trace
from shardlab.errors import InputError
from shardlab.runs.run import REHEARSAL
from shardlab.runs.rundir import RunDir
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

_SHOWN = 12  # the most rows that a table of operators shows; the JSON document contains all rows
_MS = 1e6  # ns in a millisecond
_FIGURES = ("exposed_communication_ns", "overlap_pct")


def files(workspace: Workspace, run: str) -> list[Path]:
    """Find the trace files of a run. Raises InputError if there are no traces.

    run: the id of a run; or, if it contains a slash, the path of a trace file or of a folder with traces.
    """
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
    """Print the tables or the JSON document of the traces of a run.

    Returns the exit code: 1 if a trace is damaged or nothing can be computed from it, else 0. If a trace is damaged, the part
    of the file that could be read is used.

    run: a run id, a path, or the name of the jobs that `jobs trace` submitted to read a run's traces. against: another run to
    compare with, or None. like_hta: whether to compute with the rounding of HolisticTraceAnalysis.
    """
    named = [name for name in (run, against) if name and "/" not in name]
    rehearsals = [name for name in named if RunDir(workspace.runs / name).is_rehearsal()]
    for name in rehearsals:
        output.remark(f"{name} is a {REHEARSAL}.", style="yellow")
    about: dict[str, Any] = {"run": run, "rehearsals": rehearsals}
    if "/" not in run and (found := merged.figures(workspace, run)) is not None:
        if against or like_hta:
            raise InputError(
                f"{run}: the runs of `jobs trace` keep exact figures only. Allowed: no --against and no --like-hta."
            )
        return _report(output, about, found)
    paths = files(workspace, run)
    if against is None and not like_hta:  # traces are read one after another, because thousands would not fit into memory
        return _report(output, about, in_order([file_figures(source.read(path)) for path in paths]))
    other_paths = files(workspace, against) if against else []
    traces = sorted(map(source.read, paths), key=lambda trace: order(trace.rank, str(trace.path)))
    others = [source.read(path) for path in other_paths]
    damage = [f"{trace.path}: {sentence}" for trace in others for sentence in damages(trace)]
    comparison = None
    if against:
        comparison = TraceComparison(against, differences(traces, others), [file_figures(one) for one in others], damage)
    if not like_hta:
        return _report(output, about, [file_figures(trace) for trace in traces], comparison)
    told, without = _like_hta(traces)
    of_files = [f"{trace.path}: {sentence}" for trace in traces for sentence in damages(trace)]
    _tables(output, run, told, like_hta=True)
    _tallies(output, "collectives, all ranks together", "Collective", [one for each in told for one in each.collectives])
    _kernels(output, told)
    if comparison:
        _operators(output, run, comparison.against, comparison.operators)
    _remarks(output, told, _twice([(trace.rank, trace.path) for trace in traces]), [*without, *of_files, *damage])
    document = about | {"like_hta": True, "ranks": [_document(one) for one in told]}
    document |= {"without_figures": without, "damage": [*of_files, *damage]}
    output.document(document | (comparison.document(None) if comparison else {}))
    return 1 if document["damage"] or without else 0


class TraceComparison(NamedTuple):
    """The comparison of the run with another run (option --against).

    against: the name of the other run. operators: how the operators of both runs differ. others: the figures of each trace of
    the other run. damage: sentences about damaged traces of the other run.
    """

    against: str
    operators: list[OperatorDifference]
    others: list[FileFigures]
    damage: list[str]

    def document(self, why: StepDifference | None) -> dict[str, Any]:
        """The comparison as a part of the JSON document. why: the difference between the steps of the two runs; None: not
        known."""
        return {"against": self.against, "why": why, "operators": self.operators}


def _report(
    output: Output, about: dict[str, Any], figures: Sequence[FileFigures], comparison: TraceComparison | None = None
) -> int:
    """Print the exact figures (numbers) of a run. Returns the exit code: 1 if a trace is damaged or has no figures, else 0.

    about: the first keys of the JSON document: the name of the run, and which runs are rehearsals. figures: the figures of all
    traces of the run, sorted by rank. comparison: the comparison with another run, or None.
    """
    run = about["run"]
    told = [one.breakdown for one in figures if one.breakdown]
    answers = RunAnswers([one.analysis for one in figures if one.analysis])
    without = [f"{one.path}: {one.why}" for one in figures if one.why]
    damage = [f"{one.path}: {sentence}" for one in figures for sentence in one.damage]
    damage += comparison.damage if comparison else []
    why = None
    if comparison:
        why = difference([answers], [RunAnswers([one.analysis for one in comparison.others if one.analysis])])
    _tables(output, run, told, like_hta=False)
    answer_tables.show(output, answers)
    detail_tables.show(output, answers.ranks)
    _kernels(output, told)
    if comparison:
        if why:
            answer_tables.why(output, run, comparison.against, why)
        _operators(output, run, comparison.against, comparison.operators)
    _remarks(output, told, _twice([(one.rank, Path(one.path)) for one in figures]), [*without, *damage])
    ranks = [_document(one) | run_answers.of_rank(rank) for one, rank in zip(told, answers.ranks, strict=True)]
    document = about | {"like_hta": False, "ranks": ranks}
    document |= {"without_figures": without, "damage": damage} | answers.document()
    output.document(document | (comparison.document(why) if comparison else {}))
    return 1 if damage or without else 0


def _kernels(output: Output, told: Sequence[Breakdown]) -> None:
    _tallies(
        output,
        "kernels (on CPU: operators including all that they call), all ranks together",
        "Name",
        [one for each in told for one in each.kernels],
    )


def _remarks(output: Output, told: Sequence[Breakdown], twice: Sequence[str], trouble: Sequence[str]) -> None:
    """Print remarks on the figures of a run.

    twice: sentences about ranks with several trace files. trouble: sentences about damaged traces and traces without figures.
    """
    for sentence in filter(None, [_unstable(told), *twice, *(sentence for one in told for sentence in _left_out(one))]):
        output.remark(sentence)
    for sentence in trouble:
        output.remark(sentence, style="red")


def _like_hta(traces: Sequence[Trace]) -> tuple[list[Breakdown], list[str]]:
    """Returns (figures of each trace as HolisticTraceAnalysis computes them, a sentence for each trace without figures).

    Raises InputError if no trace has figures.
    """
    found = hta.attempts(traces)
    told = [one for one in found if isinstance(one, Breakdown)]
    without = [one for one in found if isinstance(one, InputError)]
    if without and not told:
        raise without[0]
    return told, [str(one) for one in without]


def _twice(files_of_ranks: Sequence[tuple[int | None, Path]]) -> list[str]:
    """A sentence for each rank that has several trace files. files_of_ranks: for each trace, (rank that the file states,
    file)."""
    paths: defaultdict[int, list[Path]] = defaultdict(list)
    for rank, path in files_of_ranks:
        if rank is not None:
            paths[rank].append(path)
    return [
        f"rank {rank}: {len(same)} files are of this rank: {', '.join(path.name for path in same)}. Each has a row."
        for rank, same in paths.items()
        if len(same) > 1
    ]


def _left_out(one: Breakdown) -> list[str]:
    """Sentences about the events that are left out of the breakdown of a rank."""
    rank = "" if one.rank is None else f"rank {one.rank}: "
    reasons = (
        (one.before_recording, "launched before the recording began"),
        (one.outside_steps, "launched in no profiler step"),
    )
    return [
        f"{rank}{left.count:,} events of the GPU ({left.share_pct:.1f} % of its time) were {reason}; no figure contains them."
        for left, reason in reasons
        if left is not None
    ]


def _unstable(told: Sequence[Breakdown]) -> str:
    """A sentence on how far the output of HolisticTraceAnalysis may differ from these figures, because its sort is unstable.

    "" if the unstable sort cannot change any figure.
    """
    idle = [one.hta_bounds.idle_ns for one in told if one.hta_bounds is not None]
    most_us = max((high - low for low, high in idle), default=0) // 1000
    if not most_us:
        return ""
    return (
        f"HolisticTraceAnalysis itself may give up to {most_us} us more or less idle time for a rank: it sorts kernels with "
        "equal rounded starts in an order that depends on the processor (`hta_bounds` in --json)."
    )


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
    """The name of a kernel, cut to 72 characters: names of C++ templates may have hundreds of characters."""
    return name if len(name) <= 72 else f"{name[:71]}…"
