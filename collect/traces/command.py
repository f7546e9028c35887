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
from collect.traces.difference import StepDifference, compute_step_difference
from collect.traces.file_figures import FileFigures, compute_file_figures, describe_damage, rank_sort_key, sort_by_rank
from collect.traces.operators import OperatorDifference, compare_trace_operators
from collect.traces.run_answers import RunAnswers
from collect.traces.trace import Trace
from shardlab.errors import InputError
from shardlab.runs.run import REHEARSAL
from shardlab.runs.rundir import RunDir
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

_MOST_ROWS = 12  # the most rows that a table of operators shows; the JSON document contains all rows
_MS = 1e6  # ns in a millisecond
_FIGURES = ("exposed_communication_ns", "overlap_pct")


def find_trace_files(workspace: Workspace, run: str) -> list[Path]:
    """Find the trace files of a run. Raises InputError if there are no traces.

    run: the id of a run; or, if it contains a slash, the path of a trace file or of a folder with traces.
    """
    is_path = "/" in run
    folder = Path(run) if is_path else workspace.find_run(run).path / "trace"
    listed = [path for path in folder.glob("*.json*") if not path.name.startswith(".")]
    paths = [folder] if is_path and folder.is_file() else sorted(listed) if is_path else run_traces.select_regular_files(listed)
    if not paths:
        raise InputError(
            f"{folder}: no traces. Allowed: a run whose cell has instruments: {{profile: ...}}, "
            "or a folder or file (with a slash in its name) of Chrome traces, *.json or *.json.gz."
        )
    return paths


def show_traces(workspace: Workspace, run: str, against: str | None, output: Output, *, like_hta: bool) -> int:
    """Print the tables or the JSON document of the traces of a run.

    Returns the exit code: 1 if a trace is damaged or nothing can be computed from it, else 0. If a trace is damaged, the part
    of the file that could be read is used.

    run: a run id, a path, or the name of the jobs that `jobs trace` submitted to read a run's traces. against: another run to
    compare with, or None. like_hta: whether to compute with the rounding of HolisticTraceAnalysis.
    """
    run_ids = [name for name in (run, against) if name and "/" not in name]
    rehearsals = [name for name in run_ids if RunDir(workspace.runs / name).is_rehearsal()]
    for name in rehearsals:
        output.print_remark(f"{name} is a {REHEARSAL}.", style="yellow")
    header: dict[str, Any] = {"run": run, "rehearsals": rehearsals}
    if "/" not in run and (merged_figures := merged.merge_figures(workspace, run)) is not None:
        if against or like_hta:
            raise InputError(
                f"{run}: the runs of `jobs trace` keep exact figures only. Allowed: no --against and no --like-hta."
            )
        return _print_report(output, header, merged_figures)
    paths = find_trace_files(workspace, run)
    if against is None and not like_hta:  # traces are read one after another, because thousands would not fit into memory
        return _print_report(output, header, sort_by_rank([compute_file_figures(source.read_trace(path)) for path in paths]))
    other_paths = find_trace_files(workspace, against) if against else []
    traces = sorted(map(source.read_trace, paths), key=lambda trace: rank_sort_key(trace.rank, str(trace.path)))
    other_traces = [source.read_trace(path) for path in other_paths]
    damage = [f"{trace.path}: {sentence}" for trace in other_traces for sentence in describe_damage(trace)]
    comparison = None
    if against:
        other_figures = [compute_file_figures(entry) for entry in other_traces]
        comparison = TraceComparison(against, compare_trace_operators(traces, other_traces), other_figures, damage)
    if not like_hta:
        return _print_report(output, header, [compute_file_figures(trace) for trace in traces], comparison)
    breakdowns, failures = _compute_like_hta(traces)
    trace_damage = [f"{trace.path}: {sentence}" for trace in traces for sentence in describe_damage(trace)]
    _print_breakdowns(output, run, breakdowns, like_hta=True)
    collectives = [entry for breakdown in breakdowns for entry in breakdown.collectives]
    _print_tallies(output, "collectives, all ranks together", "Collective", collectives)
    _print_kernels(output, breakdowns)
    if comparison:
        _print_operators(output, run, comparison.against, comparison.operators)
    duplicates = _describe_duplicates([(trace.rank, trace.path) for trace in traces])
    _print_remarks(output, breakdowns, duplicates, [*failures, *trace_damage, *damage])
    document = header | {"like_hta": True, "ranks": [_document(entry) for entry in breakdowns]}
    document |= {"without_figures": failures, "damage": [*trace_damage, *damage]}
    output.print_document(document | (comparison.document(None) if comparison else {}))
    return 1 if document["damage"] or failures else 0


class TraceComparison(NamedTuple):
    """The comparison of the run with another run (option --against)."""

    against: str
    """The name of the other run."""
    operators: list[OperatorDifference]
    """How the operators of both runs differ."""
    others: list[FileFigures]
    """The figures of each trace of the other run."""
    damage: list[str]
    """Sentences about damaged traces of the other run."""

    def document(self, why: StepDifference | None) -> dict[str, Any]:
        """The comparison as a part of the JSON document. why: the difference between the steps of the two runs; None: not
        known."""
        return {"against": self.against, "why": why, "operators": self.operators}


def _print_report(
    output: Output, header: dict[str, Any], figures: Sequence[FileFigures], comparison: TraceComparison | None = None
) -> int:
    """Print the exact figures (numbers) of a run. Returns the exit code: 1 if a trace is damaged or has no figures, else 0.

    header: the first keys of the JSON document: the name of the run, and which runs are rehearsals. figures: the figures of all
    traces of the run, sorted by rank. comparison: the comparison with another run, or None.
    """
    run = header["run"]
    breakdowns = [entry.breakdown for entry in figures if entry.breakdown]
    answers = RunAnswers([entry.analysis for entry in figures if entry.analysis])
    failures = [f"{entry.path}: {entry.why}" for entry in figures if entry.why]
    damage = [f"{entry.path}: {sentence}" for entry in figures for sentence in entry.damage]
    damage += comparison.damage if comparison else []
    step_difference = None
    if comparison:
        others = [entry.analysis for entry in comparison.others if entry.analysis]
        step_difference = compute_step_difference([answers], [RunAnswers(others)])
    _print_breakdowns(output, run, breakdowns, like_hta=False)
    answer_tables.print_answer_tables(output, answers)
    detail_tables.print_detail_tables(output, answers.ranks)
    _print_kernels(output, breakdowns)
    if comparison:
        if step_difference:
            answer_tables.print_step_difference(output, run, comparison.against, step_difference)
        _print_operators(output, run, comparison.against, comparison.operators)
    duplicates = _describe_duplicates([(entry.rank, Path(entry.path)) for entry in figures])
    _print_remarks(output, breakdowns, duplicates, [*failures, *damage])
    ranks = [_document(entry) | run_answers.rank_document(rank) for entry, rank in zip(breakdowns, answers.ranks, strict=True)]
    document = header | {"like_hta": False, "ranks": ranks}
    document |= {"without_figures": failures, "damage": damage} | answers.document()
    output.print_document(document | (comparison.document(step_difference) if comparison else {}))
    return 1 if damage or failures else 0


def _print_kernels(output: Output, breakdowns: Sequence[Breakdown]) -> None:
    _print_tallies(
        output,
        "kernels (on CPU: operators including all that they call), all ranks together",
        "Name",
        [kernel for breakdown in breakdowns for kernel in breakdown.kernels],
    )


def _print_remarks(output: Output, breakdowns: Sequence[Breakdown], duplicates: Sequence[str], problems: Sequence[str]) -> None:
    """Print remarks on the figures of a run.

    duplicates: about ranks with several trace files. problems: sentences about damaged traces and traces without figures.
    """
    left_out = [sentence for breakdown in breakdowns for sentence in _describe_left_out(breakdown)]
    for sentence in (*duplicates, *left_out):
        output.print_remark(sentence)
    for sentence in problems:
        output.print_remark(sentence, style="red")


def _compute_like_hta(traces: Sequence[Trace]) -> tuple[list[Breakdown], list[str]]:
    """Returns (figures of each trace as HolisticTraceAnalysis computes them, a sentence for each trace without figures).

    Raises InputError if no trace has figures.
    """
    attempts = hta.attempt_breakdowns(traces)
    breakdowns = [attempt for attempt in attempts if isinstance(attempt, Breakdown)]
    errors = [attempt for attempt in attempts if isinstance(attempt, InputError)]
    if errors and not breakdowns:
        raise errors[0]
    return breakdowns, [str(attempt) for attempt in errors]


def _describe_duplicates(files_of_ranks: Sequence[tuple[int | None, Path]]) -> list[str]:
    """A sentence for each rank that has several trace files. files_of_ranks: for each trace, (rank that the file states,
    file)."""
    paths: defaultdict[int, list[Path]] = defaultdict(list)
    for rank, path in files_of_ranks:
        if rank is not None:
            paths[rank].append(path)
    return [
        f"rank {rank}: {len(rank_paths)} files are of this rank: {', '.join(path.name for path in rank_paths)}. Each has a row."
        for rank, rank_paths in paths.items()
        if len(rank_paths) > 1
    ]


def _describe_left_out(breakdown: Breakdown) -> list[str]:
    """Sentences about the events that are left out of the breakdown of a rank."""
    rank = "" if breakdown.rank is None else f"rank {breakdown.rank}: "
    reasons = (
        (breakdown.before_recording, "launched before the recording began"),
        (breakdown.outside_steps, "launched in no profiler step"),
    )
    return [
        f"{rank}{left.count:,} events of the GPU ({left.share_pct:.1f} % of its time) were {reason}; no figure contains them."
        for left, reason in reasons
        if left is not None
    ]


def _document(breakdown: Breakdown) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(breakdown)
    for rows, tallies in ((document["collectives"], breakdown.collectives), (document["kernels"], breakdown.kernels)):
        for row, event_tally in zip(rows, tallies, strict=True):
            row["mean_ns"] = event_tally.mean_ns
    return document | {name: getattr(breakdown, name) for name in _FIGURES}


def _print_breakdowns(output: Output, run: str, breakdowns: Sequence[Breakdown], *, like_hta: bool) -> None:
    rounding = "as HolisticTraceAnalysis rounds: whole microseconds, without the last profiler step" if like_hta else "exact"
    headings = ["Rank", "Source", "Steps", "Span (ms)", "Compute (ms)", "Communication (ms)", "Memory (ms)", "Non-compute (ms)"]
    headings += ["Idle (ms)", "Idle (%)", "Overlap (%)", "Exposed communication (ms)"]
    rows = [
        [
            "" if breakdown.rank is None else str(breakdown.rank),
            breakdown.source,
            str(breakdown.steps),
            *(
                _ms_text(ns)
                for ns in (
                    breakdown.span_ns,
                    breakdown.compute_ns,
                    breakdown.communication_ns,
                    breakdown.memory_ns,
                    breakdown.non_compute_ns,
                )
            ),
            _ms_text(breakdown.idle_ns),
            f"{100 * breakdown.idle_ns / breakdown.span_ns:.2f}" if breakdown.span_ns else "",
            "" if breakdown.overlap_pct is None else f"{breakdown.overlap_pct:.2f}",
            _ms_text(breakdown.exposed_communication_ns),
        ]
        for breakdown in breakdowns
    ]
    output.print_table(f"{run} ({rounding})", headings, rows)
    output.print_line("non-compute: something runs but nothing computes (exposed communication and exposed memory operations).")


def _print_tallies(output: Output, title: str, heading: str, tallies: Sequence[EventTally]) -> None:
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event_tally in tallies:
        totals[event_tally.name][0] += event_tally.count
        totals[event_tally.name][1] += event_tally.total_ns
    rows = sorted(totals.items(), key=lambda item: -item[1][1])
    shown_rows = [
        [_shorten(name), f"{n:,}", _ms_text(ns), notation.format_number(ns / n / 1000)] for name, (n, ns) in rows[:_MOST_ROWS]
    ]
    if shown_rows:
        omitted_note = f"; {len(rows) - _MOST_ROWS} more in --json" if len(rows) > _MOST_ROWS else ""
        output.print_table(f"{title}{omitted_note}", [heading, "Calls (n)", "Total (ms)", "Mean (us)"], shown_rows)


def _print_operators(output: Output, run: str, against: str, operator_differences: Sequence[OperatorDifference]) -> None:
    changed = [operator for operator in operator_differences if operator.change != "same"]
    rows = [
        [
            operator.change,
            operator.kind,
            _shorten(operator.name),
            *(notation.format_number(calls) for calls in (operator.calls, operator.against_calls)),
            *(_ms_text(ns) for ns in (operator.time_ns, operator.against_time_ns, operator.more_time_ns)),
        ]
        for operator in changed[:_MOST_ROWS]
    ]
    counts = ", ".join(
        f"{sum(operator.change == change for operator in operator_differences)} {change}"
        for change in ("new", "gone", "changed", "same")
    )
    omitted_note = f"; {len(changed) - _MOST_ROWS} more in --json" if len(changed) > _MOST_ROWS else ""
    columns = ["Change", "Kind", "Name", "Calls (n)", "Against (n)", "Time (ms)", "Against (ms)", "Difference (ms)"]
    output.print_table(f"{run} against {against}, per step and rank: {counts}{omitted_note}", columns, rows)


def _ms_text(ns: float | None) -> str:
    return "" if ns is None else notation.format_number(ns / _MS)


def _shorten(name: str) -> str:
    """The name of a kernel, cut to 72 characters: names of C++ templates may have hundreds of characters."""
    return name if len(name) <= 72 else f"{name[:71]}…"
