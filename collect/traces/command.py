"""`collect trace`: shows how a run spends its profiled steps, and how its operators differ from those of another run.

Of runs of `jobs trace`, it merges the summaries, each of which is of a part of a folder of traces.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from collect.traces import answer_tables, change_tables, hta, run_traces
from collect.traces import trace as source
from collect.traces.advice import find_advice
from collect.traces.breakdown import Breakdown
from collect.traces.difference import DifferenceRow, StepDifference, compute_step_difference, make_difference_table
from collect.traces.file_figures import (
    FileFigures,
    compute_file_figures,
    describe_damage,
    expect_gpu,
    make_rank_sort_key,
    sort_by_rank,
)
from collect.traces.lacks import SPOILING, Lack
from collect.traces.operators import OperatorDifference, compare_trace_operators
from collect.traces.rank_analysis import make_rank_document
from collect.traces.run_answers import RunAnswers
from collect.traces.trace import Trace
from shardlab.errors import InputError, ShardlabError
from shardlab.files import json_file
from shardlab.runs import trace_part
from shardlab.runs.run import REHEARSAL_NOTE, Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import SET_NAME, SUMMARIES_FOLDER, TracePart, make_summary_name
from shardlab.terminal.console import Output
from shardlab.terminal.table import Table
from shardlab.workspace.workspace import Workspace

_MOST_NAMED_RUNS = 5  # the most runs that a message names


_DERIVED_FIGURES = ("exposed_communication_ns", "overlap_pct", "bounds")
_MOST_FILES = 8  # the most files for which a sentence is printed for each kind of lack


def show_traces(workspace: Workspace, run: str, against: str | None, output: Output, *, like_hta: bool) -> int:
    """Print the tables or the JSON document of the traces of a run.

    Returns the exit code: 1 if a trace is damaged or nothing can be computed from it, else 0. If a trace is damaged, the part
    of the file that could be read is used.

    run: the name of a run, a path, or the name of the jobs that `jobs trace` submitted to read traces. against: another run to
    compare with, or None. like_hta: whether to compute with the rounding of HolisticTraceAnalysis.
    """
    merged_figures = None if "/" in run else merge_figures(workspace, run)
    run = run if merged_figures is not None else _find_run_id(workspace, run)
    against = _find_run_id(workspace, against) if against else None
    run_ids = [run_id for run_id in (run, against) if run_id and "/" not in run_id]
    rehearsals = [run_id for run_id in run_ids if RunDir(workspace.runs / run_id).is_rehearsal()]
    for run_id in rehearsals:
        output.print_remark(f"{run_id} is a {REHEARSAL_NOTE}.", style="yellow")
    document_header: dict[str, Any] = {"run": run, "rehearsals": rehearsals}
    if merged_figures is not None:
        if against or like_hta:
            raise InputError(
                f"{run}: the runs of `jobs trace` keep exact figures only. Allowed: no --against and no --like-hta."
            )
        return _print_report(output, document_header, merged_figures)
    paths = find_trace_files(workspace, run)
    used_gpus = None if "/" in run else run_traces.trained_on_gpus(RunDir(workspace.runs / run).read_result())
    if against is None and not like_hta:  # traces are read one after another, because thousands would not fit into memory
        return _print_report(
            output,
            document_header,
            sort_by_rank([expect_gpu(compute_file_figures(source.read_trace(path)), used_gpus) for path in paths]),
        )
    other_paths = find_trace_files(workspace, against) if against else []
    traces = sorted(map(source.read_trace, paths), key=lambda trace: make_rank_sort_key(trace.rank, str(trace.path)))
    other_traces = [source.read_trace(path) for path in other_paths]
    damage_sentences = [f"{trace.path}: {lack_sentence}" for trace in other_traces for lack_sentence in describe_damage(trace)]
    comparison = None
    if against:
        other_figures = [compute_file_figures(trace) for trace in other_traces]
        comparison = TraceComparison(against, compare_trace_operators(traces, other_traces), other_figures, damage_sentences)
    if not like_hta:
        return _print_report(
            output, document_header, [expect_gpu(compute_file_figures(trace), used_gpus) for trace in traces], comparison
        )
    breakdowns, failures = _compute_like_hta(traces)
    for lack_sentence in (f"{breakdown.file}: {lack.text}" for breakdown in breakdowns for lack in breakdown.lacks):
        output.print_remark(lack_sentence, style="yellow")
    trace_damage = [f"{trace.path}: {lack_sentence}" for trace in traces for lack_sentence in describe_damage(trace)]
    _print_breakdowns(output, run, breakdowns, like_hta=True)
    collective_tallies = [trace for breakdown in breakdowns for trace in breakdown.collectives]
    if collective_tallies:
        output.show_table(answer_tables.make_tally_table("collectives", "Collective", collective_tallies))
    _print_kernels(output, breakdowns)
    if comparison:
        output.show_table(answer_tables.make_operators_table(run, comparison.other_run, comparison.operators))
    duplicate_sentences = _describe_duplicates([(trace.rank, trace.path.name) for trace in traces])
    _print_remarks(output, breakdowns, duplicate_sentences, [*failures, *trace_damage, *damage_sentences])
    json_document = document_header | {"like_hta": True, "ranks": [_make_breakdown_document(trace) for trace in breakdowns]}
    json_document |= {"without_figures": failures, "damage": [*trace_damage, *damage_sentences]}
    output.print_document(json_document | (comparison.make_document(None) if comparison else {}))
    return 1 if json_document["damage"] or failures else 0


def _find_run_id(workspace: Workspace, run_name: str) -> str:
    """The id of the run with this name; a path, which has a slash, is returned unchanged. Raises InputError."""
    return run_name if "/" in run_name else workspace.find_run_dir(run_name).run_id


class TraceComparison(NamedTuple):
    """The comparison of the run with another run (option --against)."""

    other_run: str
    """The name of the other run."""
    operators: list[OperatorDifference]
    """How the operators of both runs differ."""
    other_figures: list[FileFigures]
    """The figures of each trace of the other run."""
    damage_sentences: list[str]
    """Sentences about damaged traces of the other run."""

    def make_document(self, step_difference: StepDifference | None, not_compared: str = "") -> dict[str, Any]:
        """The comparison as a part of the JSON document. step_difference: the difference between the steps of the two runs;
        None: not known. not_compared: why nothing is compared; "" if the runs are compared."""
        operators = None if not_compared else self.operators
        return {"against": self.other_run, "why": step_difference, "operators": operators, "not_compared": not_compared or None}


def _print_report(
    output: Output, document_header: dict[str, Any], figures: Sequence[FileFigures], comparison: TraceComparison | None = None
) -> int:
    """Print the exact figures (numbers) of a run. Returns the exit code: 1 if a trace is damaged or has no figures, else 0.

    document_header: the first keys of the JSON document: the name of the run, and which runs are rehearsals. figures: the
    figures of all traces of the run, sorted by rank. comparison: the comparison with another run, or None."""
    run = document_header["run"]
    names = dict(zip((file.path for file in figures), name_files([file.path for file in figures]), strict=True))
    breakdowns = [structs.replace(file.breakdown, file=names[file.path]) for file in figures if file.breakdown]
    analyses = [structs.replace(file.analysis, file=names[file.path]) for file in figures if file.analysis]
    run_answers = RunAnswers(analyses)
    failures = [f"{file.path}: {file.why}" for file in figures if file.why]
    damage_sentences = [f"{file.path}: {remark}" for file in figures for remark in file.damage]
    damage_sentences += comparison.damage_sentences if comparison else []
    step_difference, not_compared = (
        None,
        explain_missing_comparison([*figures, *comparison.other_figures]) if comparison else "",
    )
    if comparison and not not_compared:
        other_analyses = [file.analysis for file in comparison.other_figures if file.analysis]
        step_difference = compute_step_difference([run_answers], [RunAnswers(other_analyses)])
    advice = find_advice([run_answers], len(run_answers.ranks))
    if advice:
        output.show_table(change_tables.make_advice_table(advice))
    _print_breakdowns(output, run, breakdowns, like_hta=False)
    answer_tables.print_answer_tables(output, run_answers)
    _print_kernels(output, breakdowns)
    if comparison and step_difference:
        output.show_table(_make_step_table(run, comparison.other_run, step_difference))
    if comparison and not not_compared:
        output.show_table(answer_tables.make_operators_table(run, comparison.other_run, comparison.operators))
    for remark in (*describe_lacks(figures, names, run_answers), *([not_compared] if not_compared else [])):
        output.print_remark(remark, style="yellow")
    duplicate_sentences = _describe_duplicates([(file.rank, names[file.path]) for file in figures])
    _print_remarks(output, breakdowns, duplicate_sentences, [*failures, *damage_sentences])
    rank_documents = [
        _make_breakdown_document(file) | make_rank_document(rank_analysis)
        for file, rank_analysis in zip(breakdowns, run_answers.ranks, strict=True)
    ]
    json_document = document_header | {"like_hta": False, "advice": msgspec.to_builtins(advice), "ranks": rank_documents}
    json_document |= {"without_figures": failures, "lacks": make_lack_documents(figures, names), "damage": damage_sentences}
    json_document |= run_answers.make_document()
    output.print_document(json_document | (comparison.make_document(step_difference, not_compared) if comparison else {}))
    return 1 if damage_sentences or failures else 0


def _print_breakdowns(output: Output, run: str, breakdowns: Sequence[Breakdown], *, like_hta: bool) -> None:
    breakdown_table = answer_tables.make_breakdown_table(run, breakdowns, like_hta=like_hta)
    output.show_table(breakdown_table)
    output.print_line(breakdown_table.note)
    if (devices_table := answer_tables.make_devices_table(breakdowns)).rows:
        output.show_table(devices_table)


def _print_kernels(output: Output, breakdowns: Sequence[Breakdown]) -> None:
    kernel_tallies = [kernel for breakdown in breakdowns for kernel in breakdown.kernels]
    if kernel_tallies:
        table_title = "kernels (on CPU: operators including all that they call)"
        output.show_table(answer_tables.make_tally_table(table_title, "Name", kernel_tallies))


def _make_step_table(run: str, other_run: str, step_difference: StepDifference) -> Table[DifferenceRow]:
    """The table that divides the difference between a step of the run and a step of the other run into parts."""
    if not step_difference.difference_ns:
        return make_difference_table(f"{run} and {other_run}: mean {step_difference.per}", step_difference, "against")
    faster_or_slower = "slower" if step_difference.difference_ns > 0 else "faster"
    table_title = f"why {run} is {faster_or_slower} than {other_run}: mean {step_difference.per}, parts sum to the difference"
    return make_difference_table(table_title, step_difference, "against")


def _print_remarks(output: Output, breakdowns: Sequence[Breakdown], duplicates: Sequence[str], problems: Sequence[str]) -> None:
    """Print remarks on the figures of a run.

    duplicates: about ranks with several trace files. problems: sentences about damaged traces and traces
    without figures."""
    left_out_sentences = [sentence for breakdown in breakdowns for sentence in _describe_left_out(breakdown)]
    for sentence in (*duplicates, *left_out_sentences):
        output.print_remark(sentence)
    for sentence in problems:
        output.print_remark(sentence, style="red")


def _compute_like_hta(traces: Sequence[Trace]) -> tuple[list[Breakdown], list[str]]:
    """Returns (figures of each trace as HolisticTraceAnalysis computes them, a sentence for each trace without figures).

    Raises InputError if no trace has figures.
    """
    attempts = hta.attempt_breakdowns(traces)
    breakdowns = [breakdown_or_error for breakdown_or_error in attempts if isinstance(breakdown_or_error, Breakdown)]
    errors = [breakdown_or_error for breakdown_or_error in attempts if isinstance(breakdown_or_error, InputError)]
    if errors and not breakdowns:
        raise errors[0]
    return breakdowns, [str(breakdown_or_error) for breakdown_or_error in errors]


def _describe_duplicates(ranks_and_files: Sequence[tuple[int | None, str]]) -> list[str]:
    """A sentence for each rank that has several trace files. ranks_and_files: for each trace, (rank that the file states,
    file)."""
    names_by_rank: defaultdict[int, list[str]] = defaultdict(list)
    for rank, file_name in ranks_and_files:
        if rank is not None:
            names_by_rank[rank].append(file_name)
    return [
        f"rank {rank}: {len(file_names)} files are of this rank: {', '.join(file_names)}. Each has a row."
        for rank, file_names in names_by_rank.items()
        if len(file_names) > 1
    ]


def _describe_left_out(breakdown: Breakdown) -> list[str]:
    """Sentences about the events that are left out of the breakdown of a rank."""
    rank = "" if breakdown.rank is None else f"rank {breakdown.rank}: "
    parts_and_reasons = (
        (breakdown.before_recording, "launched before the recording began"),
        (breakdown.outside_steps, "launched in no profiler step"),
    )
    return [
        f"{rank}{part.count:,} events of the GPU ({part.share_pct:.1f} % of its time) were {cause}; no figure contains them."
        for part, cause in parts_and_reasons
        if part is not None
    ]


def _make_breakdown_document(breakdown: Breakdown) -> dict[str, Any]:
    breakdown_document: dict[str, Any] = msgspec.to_builtins(breakdown)
    for tally_documents, tallies in (
        (breakdown_document["collectives"], breakdown.collectives),
        (breakdown_document["kernels"], breakdown.kernels),
    ):
        for tally_document, event_tally in zip(tally_documents, tallies, strict=True):
            tally_document["mean_ns"] = event_tally.mean_ns
    return breakdown_document | {figure_name: getattr(breakdown, figure_name) for figure_name in _DERIVED_FIGURES}


def find_trace_files(workspace: Workspace, run: str) -> list[Path]:
    """Find the trace files of a run. Raises InputError if there are no traces.

    run: the id of a run; or, if it contains a slash, the path of a trace file or of a folder with traces, also in its
    subfolders.
    """
    is_run_path = "/" in run
    trace_path = Path(run) if is_run_path else workspace.find_run_dir(run).path / "trace"
    if is_run_path and trace_path.is_file():
        return [trace_path]
    trace_paths = trace_part.find_trace_paths(trace_path)
    chosen_paths = trace_paths if is_run_path else run_traces.select_regular_files(trace_paths)
    if not chosen_paths:
        raise InputError(
            f"{trace_path}: no traces. Allowed: a run whose cell has instruments: {{profile: ...}}, or a folder or "
            f"file (with a slash in its name) of Chrome traces, *.json or *.json.gz; subfolders are searched too."
        )
    return chosen_paths


def name_files(paths: Sequence[str]) -> list[str]:
    """The name of each file in their common folder, such as iteration_10/rank0_trace.json."""
    folder = os.path.commonpath([Path(path).parent for path in paths]) if paths else ""
    return [os.path.relpath(path, folder or ".") for path in paths]


def describe_lacks(figures: Sequence[FileFigures], name_by_path: Mapping[str, str], answers: RunAnswers) -> list[str]:
    """A sentence for each file and kind of lack, and one about ranks that were not profiled. name_by_path: the name of each
    path."""
    lacks_by_kind: dict[str, list[tuple[str, Lack]]] = {}
    for file_figures in figures:
        for lack in file_figures.lacks:
            lacks_by_kind.setdefault(lack.kind, []).append((name_by_path[file_figures.path], lack))
    sentences = []
    for kind_lacks in lacks_by_kind.values():
        sentences += [f"{file_name}: {lack.text}" for file_name, lack in kind_lacks[:_MOST_FILES]]
        if rest := kind_lacks[_MOST_FILES:]:
            sentences.append(f"{len(rest):,} more files lack the same: {sum(lack.count for _, lack in rest):,} in all.")
    return [*sentences, *([answers.missing_ranks] if answers.missing_ranks else [])]


def make_lack_documents(figures: Sequence[FileFigures], name_by_path: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each file lacks, as JSON values."""
    return [
        {"file": name_by_path[file_figures.path], "rank": file_figures.rank} | msgspec.to_builtins(lack, str_keys=True)
        for file_figures in figures
        for lack in file_figures.lacks
    ]


def explain_missing_comparison(figures: Sequence[FileFigures]) -> str:
    """A sentence that says why runs with these traces are not compared; "" if they are."""
    path_by_lack = {lack.kind: file.path for file in figures for lack in file.lacks if lack.kind in SPOILING}
    if not path_by_lack:
        return ""
    lacks_text = ", ".join(f"{file_path}: {lack_kind}" for lack_kind, file_path in path_by_lack.items())
    return f"not compared, because a recording is incomplete ({lacks_text})."


def merge_figures(workspace: Workspace, set_name: str) -> list[FileFigures] | None:
    """The figures (numbers) of all traces that the runs of the set `set_name` analysed, sorted by rank; None if there is no
    such run.

    The result is the same as if one machine had analysed the whole folder. Raises InputError if a part of the folder has not
    been analysed completely, or if a summary cannot be read.
    """
    latest_run_by_part = _find_latest_runs(workspace, set_name) if SET_NAME.fullmatch(set_name) else {}
    if not latest_run_by_part:
        return None
    part_count = next(iter(latest_run_by_part.values()))[2].parts
    missing_parts = sorted(set(range(part_count)) - latest_run_by_part.keys())
    if missing_parts:
        raise InputError(f"{set_name}: {len(missing_parts)} of {part_count} parts have no run. `jobs trace` submits them.")
    unfinished_ids = [run_dir.run_id for run_dir, _, _ in latest_run_by_part.values() if run_dir.judge().state != "completed"]
    if unfinished_ids:
        run_ids_text = ", ".join(unfinished_ids[:_MOST_NAMED_RUNS])
        more_text = f" and {len(unfinished_ids) - _MOST_NAMED_RUNS} more" if len(unfinished_ids) > _MOST_NAMED_RUNS else ""
        raise InputError(
            f"{set_name}: {len(unfinished_ids)} of {part_count} parts have not completed: {run_ids_text}{more_text}. "
            "`jobs status` says why; on a remote cluster, `collect fetch` copies the runs first."
        )
    return sort_by_rank(
        [
            file_summary
            for part_number in range(part_count)
            for file_summary in _read_summaries(latest_run_by_part[part_number][0], latest_run_by_part[part_number][2])
        ]
    )


def _find_latest_runs(workspace: Workspace, set_name: str) -> Mapping[int, tuple[RunDir, Run, TracePart]]:
    """The latest run for each part of the folder of traces: {number of the part: (run folder, run.json, traces of the part)}.

    set_name: the name of the set of runs. Runs whose records cannot be read are left out.
    """
    latest_run_by_part: dict[int, tuple[RunDir, Run, TracePart]] = {}
    for run_dir in workspace.list_run_dirs():
        try:
            run = run_dir.read_run()
        except ShardlabError:
            continue
        if run.traces is None or run.matrix != set_name:
            continue
        earlier_run = latest_run_by_part.get(run.traces.place)
        if earlier_run is None or earlier_run[1].attempt < run.attempt:
            latest_run_by_part[run.traces.place] = (run_dir, run, run.traces)
    return latest_run_by_part


def _read_summaries(run_dir: RunDir, trace_part: TracePart) -> list[FileFigures]:
    file_summaries = []
    for file_number in range(len(trace_part.files)):
        summary_path = run_dir.path / SUMMARIES_FOLDER / make_summary_name(file_number)
        file_summary = json_file.read_json(summary_path, FileFigures, "is not a summary of this version: {}.")
        if file_summary is None:
            raise InputError(f"{summary_path}: the summary is missing, although the run completed.")
        file_summaries.append(file_summary)
    return file_summaries
