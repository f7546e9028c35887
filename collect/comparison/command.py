"""`collect compare`: shows which cells of two matrices have different results, and possible reasons for the differences."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from collect.archiving import command as archiving
from collect.comparison import gate
from collect.comparison.compare import (
    ComparedMatrix,
    ComparedSide,
    Comparison,
    MetricComparison,
    compare_matrices,
    select_differing_metrics,
)
from collect.reading.load import load_matrix
from collect.report import verdict_text
from collect.summary import summarize
from shardlab.errors import InputError
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

MOST_VALUES = 6  # the most values of a key that a sentence lists
SHOWN_METRICS = ("throughput_per_s", "step_time_ms", "peak_memory_bytes", "final_loss", "final_accuracy_pct")
# Verdict on B, compared with A -> colour of the row.
VERDICT_STYLES = {"faster": "green", "slower": "red", "higher": "yellow", "lower": "yellow"}


def show_comparison(
    workspace: Workspace,
    a: str,
    b: str,
    matrix: str | None,
    output: Output,
    fail_if: Sequence[str] = (),
    *,
    is_strict: bool = False,
) -> int:
    """Compare two sets of results, called A and B, and print tables or the JSON document. Returns the exit code.

    a, b, matrix: as in `compare_by_name`. fail_if: conditions under which the exit code is 1 (`gate.parse_condition`).
    is_strict: whether it is also 1 if a condition is not decided. Raises InputError.
    """
    if is_strict and not fail_if:
        raise InputError("--strict: allowed only together with --fail-if.")
    conditions = [gate.parse_condition(text) for text in fail_if]
    comparison = compare_by_name(workspace, a, b, matrix)
    gates = [gate.judge_condition(condition, comparison) for condition in conditions]
    print_comparison(output, comparison)
    for line in (line for judged_gate in gates for line in gate.describe_gate(judged_gate)):
        output.print_line(line)
    output.print_document(msgspec.structs.replace(comparison, gates=gates))
    return gate.choose_exit_code(gates, is_strict=is_strict)


def compare_by_name(workspace: Workspace, a: str, b: str, matrix: str | None) -> Comparison:
    """Compare two sets of results, called A and B.

    a, b: where A and B are, each as the name of a matrix of `workspace`, the folder of another workspace, or an archive.
    matrix: which matrix of the other workspaces is compared; None: their last matrix. Raises InputError if `a` or `b` is
    neither a matrix nor a folder nor an archive.
    """
    with contextlib.ExitStack() as open_archives:
        sides = [_find_side(workspace, name, matrix, open_archives) for name in (a, b)]
        matrices = []
        for name, (side_workspace, side_matrix) in zip((a, b), sides, strict=True):
            loaded = load_matrix(side_workspace, side_matrix)
            matrices.append(ComparedMatrix(name, side_workspace, loaded, summarize(loaded, loaded.expansion.baseline)))
        return compare_matrices(*matrices)


def _find_side(
    workspace: Workspace, name: str, matrix: str | None, open_archives: contextlib.ExitStack
) -> tuple[Workspace, str | None]:
    """Find the workspace that contains one of the two sets of results. Returns (workspace, name of the matrix; None: the last
    one).

    name: the name of a matrix of `workspace`, the folder of a workspace, or an archive. open_archives: if `name` is an archive,
    its files stay unpacked in a temporary folder until `open_archives` is closed."""
    if name in workspace.list_matrix_names():
        if matrix is not None:
            raise InputError(f"--matrix: {name} is itself a matrix. Allowed: --matrix only if A and B are both workspaces.")
        return workspace, name
    if Path(name).is_file():
        return open_archives.enter_context(archiving.unpack_as_workspace(Path(name))), matrix
    if not Path(name).is_dir():
        matrix_names = ", ".join(workspace.list_matrix_names()) or "none here"
        raise InputError(
            f"{name}: is neither a matrix of this workspace nor a folder nor a file. Allowed: a folder, an archive, or "
            f"a matrix ({matrix_names})."
        )
    return Workspace(Path(name)), matrix


def print_comparison(output: Output, comparison: Comparison) -> None:
    """Print the tables and sentences of a comparison."""
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        output.print_line(f"{letter}: {_side_title(side)}")
    for remark in dict.fromkeys((*comparison.a.remarks, *comparison.b.remarks)):
        letters = [letter for letter, side in (("A", comparison.a), ("B", comparison.b)) if remark in side.remarks]
        output.print_line(f"{' and '.join(letters)}: {remark}", style="yellow")
    _print_pairs(output, comparison)
    for difference in comparison.differs:
        in_a, in_b = (verdict_text.value_text(value) for value in (difference.a, difference.b))
        output.print_line(f"cells were matched although {difference.key} differs: {in_a} in A, {in_b} in B", style="yellow")

    for letter, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if labels:
            output.print_line(f"only in {letter}: {'; '.join(labels)}")
    if comparison.environment:
        rows = [[difference.what, ", ".join(difference.a), ", ".join(difference.b)] for difference in comparison.environment]
        output.print_table(
            "what else differs (possible reasons; it is not proven that they are the cause)", ["", "A", "B"], rows
        )
    elif comparison.pairs:
        output.print_line("as far as it is known, the common cells ran on equal machines, with the same software and commit")


def _print_pairs(output: Output, comparison: Comparison) -> None:
    if not comparison.pairs:
        output.print_line(f"no cell is in both A and B{_no_pairs_reason(comparison)}.", style="yellow")
        return
    rows, styles, other_metrics = [], [], []
    for pair in comparison.pairs:
        if pair.different_work:
            rows.append([pair.label, "", "", "", "", "", "", "different work"])
            styles.append("yellow")
            continue
        metrics = {metric.metric: metric for metric in pair.metrics}
        shown_metrics = [metrics[name] for name in (*SHOWN_METRICS, *(metrics if output.verbose else ())) if name in metrics]
        shown_metrics = list(dict.fromkeys(shown_metrics))
        unlisted = [metric for metric in select_differing_metrics(pair.metrics) if metric not in shown_metrics]
        other_metrics += [f"{pair.label}: {metric.metric} {metric.verdict}" for metric in unlisted]
        rows += [[pair.label, *_metric_row(metric)] for metric in shown_metrics]
        styles += [VERDICT_STYLES.get(metric.verdict, "") for metric in shown_metrics]
        if not pair.metrics:
            rows.append([pair.label, "", pair.state_a, pair.state_b, "", "", "", "no metric in both"])
            styles.append("dim")
    headings = ["Cell", "Metric", "A", "B", "B / A", "95 % interval", "n", "B is"]
    output.print_table("", headings, rows, styles, {"n": 3, "95 % interval": 2, "A": 1, "B": 1})
    remarks: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        for text in filter(None, (pair.different_work, *pair.remarks)):
            remarks.setdefault(text, []).append(pair.label)
    for text, labels in remarks.items():
        output.print_line(
            f"{text}: {'all cells' if len(labels) == len(comparison.pairs) > 1 else '; '.join(labels)}", style="yellow"
        )
    for reason in dict.fromkeys(metric.why for pair in comparison.pairs for metric in pair.metrics if metric.why):
        output.print_line(f"no interval: {reason}")
    if other_metrics:
        output.print_line(f"other metrics that differ (--verbose shows all metrics): {'; '.join(other_metrics)}")
    if comparison.by_chance:
        differing_count = sum(len(select_differing_metrics(pair.metrics)) for pair in comparison.pairs)
        chance_text = notation.format_number(comparison.by_chance, 2)
        output.print_line(
            f"{differing_count} of all metrics differ at the 95 % level; about {chance_text} would differ by chance alone"
        )


def _no_pairs_reason(comparison: Comparison) -> str:
    """The reason why no cell is in both A and B, such as `: steps is 5 in A and 10 in B`; '' if the reason is not known."""

    def list_values(values: Sequence[Any]) -> str:
        texts = [verdict_text.value_text(value) or "none" for value in values[:MOST_VALUES]]
        return ", ".join([*texts, *(["..."] if len(values) > MOST_VALUES else [])])

    keys = [f"{entry.key} is {list_values(entry.a)} in A and {list_values(entry.b)} in B" for entry in comparison.apart]
    if not keys:
        return ": no single key explains the difference" if comparison.only_a and comparison.only_b else ""
    return f": {'; '.join(keys)}"


def _metric_row(metric: MetricComparison) -> list[str]:
    interval = "none"
    if 1 in (metric.n_a, metric.n_b) and metric.verdict == "undecided":
        interval = "none: n = 1"
    if metric.low is not None and metric.high is not None:
        interval = f"{notation.format_number(metric.low)} to {notation.format_number(metric.high)}"
    return [
        metric.metric,
        verdict_text.format_quantity(metric.a, metric.unit),
        verdict_text.format_quantity(metric.b, metric.unit),
        notation.format_number(metric.ratio) if metric.ratio is not None else "",
        interval,
        f"{metric.n_a}, {metric.n_b}",
        metric.verdict,
    ]


def _side_title(side: ComparedSide) -> str:
    return f"{side.name}: {side.matrix}{': ' + side.title if side.title else ''}"
