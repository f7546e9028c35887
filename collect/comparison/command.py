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
from collect.findings import columns
from collect.reading.load import load_matrix
from collect.report import verdict_text
from collect.summary import summarize
from shardlab.errors import InputError
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

MOST_LISTED_VALUES = 6  # the most values of a key that a sentence lists
SHOWN_METRICS = ("throughput_per_s", "step_time_ms", "peak_memory_bytes", "final_loss", "final_accuracy_pct")
# Verdict on B, compared with A -> colour of the row.
STYLE_BY_VERDICT = {"faster": "green", "slower": "red", "higher": "yellow", "lower": "yellow"}


def show_comparison(
    workspace: Workspace,
    source_a: str,
    source_b: str,
    matrix_name: str | None,
    output: Output,
    condition_texts: Sequence[str] = (),
    *,
    is_strict: bool = False,
) -> int:
    """Compare two sets of results, called A and B, and print tables or the JSON document. Returns the exit code.

    source_a, source_b, matrix_name: as in `compare_by_name`. condition_texts: conditions under which the exit code is 1
    (`gate.parse_condition`). is_strict: whether it is also 1 if a condition is not decided. Raises InputError.
    """
    if is_strict and not condition_texts:
        raise InputError("--strict: allowed only together with --fail-if.")
    conditions = [gate.parse_condition(condition_text) for condition_text in condition_texts]
    comparison = compare_by_name(workspace, source_a, source_b, matrix_name)
    gates = [gate.judge_condition(condition, comparison) for condition in conditions]
    print_comparison(output, comparison)
    for line in (line for judged_gate in gates for line in gate.describe_gate(judged_gate)):
        output.print_line(line)
    output.print_document(msgspec.structs.replace(comparison, gates=gates))
    return gate.choose_exit_code(gates, is_strict=is_strict)


def compare_by_name(workspace: Workspace, source_a: str, source_b: str, matrix_name: str | None) -> Comparison:
    """Compare two sets of results, called A and B.

    source_a, source_b: where A and B are, each as the name of a matrix of `workspace`, the folder of another workspace, or an
    archive. matrix_name: which matrix of the other workspaces is compared; None: their last matrix. Raises InputError if
    `source_a` or `source_b` is neither a matrix nor a folder nor an archive.
    """
    with contextlib.ExitStack() as open_archives:
        sides = [_find_side_workspace(workspace, source, matrix_name, open_archives) for source in (source_a, source_b)]
        matrices = []
        for source, (side_workspace, side_matrix) in zip((source_a, source_b), sides, strict=True):
            loaded = load_matrix(side_workspace, side_matrix)
            matrices.append(ComparedMatrix(source, side_workspace, loaded, summarize(loaded, loaded.expansion.baseline)))
        return compare_matrices(*matrices)


def _find_side_workspace(
    workspace: Workspace, source: str, matrix_name: str | None, open_archives: contextlib.ExitStack
) -> tuple[Workspace, str | None]:
    """Find the workspace that contains one of the two sets of results. Returns (workspace, name of the matrix; None: the last
    one).

    source: the name of a matrix of `workspace`, the folder of a workspace, or an archive. open_archives: if `source` is an
    archive, its files stay unpacked in a temporary folder until `open_archives` is closed."""
    if source in workspace.list_matrix_names():
        if matrix_name is not None:
            raise InputError(f"--matrix: {source} is itself a matrix. Allowed: --matrix only if A and B are both workspaces.")
        return workspace, source
    if Path(source).is_file():
        return open_archives.enter_context(archiving.unpack_as_workspace(Path(source))), matrix_name
    if not Path(source).is_dir():
        matrix_names = ", ".join(workspace.list_matrix_names()) or "none here"
        raise InputError(
            f"{source}: is neither a matrix of this workspace nor a folder nor a file. Allowed: a folder, an archive, "
            f"or a matrix ({matrix_names})."
        )
    return Workspace(Path(source)), matrix_name


def print_comparison(output: Output, comparison: Comparison) -> None:
    """Print the tables and sentences of a comparison."""
    for side_letter, side in (("A", comparison.a), ("B", comparison.b)):
        output.print_line(f"{side_letter}: {_make_side_title(side)}")
    for remark in dict.fromkeys((*comparison.a.remarks, *comparison.b.remarks)):
        letters = [side_letter for side_letter, side in (("A", comparison.a), ("B", comparison.b)) if remark in side.remarks]
        output.print_line(f"{' and '.join(letters)}: {remark}", style="yellow")
    _print_pairs(output, comparison)
    for difference in comparison.differs:
        in_a, in_b = (columns.format_value(value) or "none" for value in (difference.a, difference.b))
        output.print_line(f"cells were matched although {difference.key} differs: {in_a} in A, {in_b} in B", style="yellow")

    for side_letter, cell_labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if cell_labels:
            output.print_line(f"only in {side_letter}: {'; '.join(cell_labels)}")
    if comparison.environment:
        rows = [[difference.what, ", ".join(difference.a), ", ".join(difference.b)] for difference in comparison.environment]
        output.print_table(
            "what else differs (possible reasons; it is not proven that they are the cause)", ["", "A", "B"], rows
        )
    elif comparison.pairs:
        output.print_line("as far as it is known, the common cells ran on equal machines, with the same software and commit")


def _print_pairs(output: Output, comparison: Comparison) -> None:
    if not comparison.pairs:
        output.print_line(f"no cell is in both A and B{_explain_no_pairs(comparison)}.", style="yellow")
        return
    table_rows, row_styles, other_metrics = [], [], []
    for pair in comparison.pairs:
        if pair.different_work:
            table_rows.append([pair.label, "", "", "", "", "", "", "different work"])
            row_styles.append("yellow")
            continue
        metrics = {compared.metric: compared for compared in pair.metrics}
        shown_metrics = [metrics[name] for name in (*SHOWN_METRICS, *(metrics if output.verbose else ())) if name in metrics]
        shown_metrics = list(dict.fromkeys(shown_metrics))
        unlisted_metrics = [compared for compared in select_differing_metrics(pair.metrics) if compared not in shown_metrics]
        other_metrics += [f"{pair.label}: {compared.metric} {compared.verdict}" for compared in unlisted_metrics]
        table_rows += [[pair.label, *_make_metric_row(compared)] for compared in shown_metrics]
        row_styles += [STYLE_BY_VERDICT.get(compared.verdict, "") for compared in shown_metrics]
        if not pair.metrics:
            table_rows.append([pair.label, "", pair.state_a, pair.state_b, "", "", "", "no metric in both"])
            row_styles.append("dim")
    headings = ["Cell", "Metric", "A", "B", "B / A", "95 % interval", "n", "B is"]
    output.print_table("", headings, table_rows, row_styles, {"n": 3, "95 % interval": 2, "A": 1, "B": 1})
    labels_by_remark: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        for remark in filter(None, (pair.different_work, *pair.remarks)):
            labels_by_remark.setdefault(remark, []).append(pair.label)
    for remark, labels in labels_by_remark.items():
        output.print_line(
            f"{remark}: {'all cells' if len(labels) == len(comparison.pairs) > 1 else '; '.join(labels)}", style="yellow"
        )
    for reason in dict.fromkeys(compared.why for pair in comparison.pairs for compared in pair.metrics if compared.why):
        output.print_line(f"no interval: {reason}")
    if other_metrics:
        output.print_line(f"other metrics that differ (--verbose shows all metrics): {'; '.join(other_metrics)}")
    if comparison.by_chance:
        differing_count = sum(len(select_differing_metrics(pair.metrics)) for pair in comparison.pairs)
        chance_text = notation.format_number(comparison.by_chance, 2)
        output.print_line(
            f"{differing_count} of all metrics differ at the 95 % level; about {chance_text} would differ by chance alone"
        )


def _explain_no_pairs(comparison: Comparison) -> str:
    """The reason why no cell is in both A and B, such as `: steps is 5 in A and 10 in B`; '' if the reason is not known."""

    def list_values(values: Sequence[Any]) -> str:
        value_texts = [columns.format_value(value) or "none" for value in values[:MOST_LISTED_VALUES]]
        return ", ".join([*value_texts, *(["..."] if len(values) > MOST_LISTED_VALUES else [])])

    key_texts = [f"{key.key} is {list_values(key.a)} in A and {list_values(key.b)} in B" for key in comparison.apart]
    if not key_texts:
        return ": no single key explains the difference" if comparison.only_a and comparison.only_b else ""
    return f": {'; '.join(key_texts)}"


def _make_metric_row(metric_comparison: MetricComparison) -> list[str]:
    interval_text = "none"
    if 1 in (metric_comparison.n_a, metric_comparison.n_b) and metric_comparison.verdict == "undecided":
        interval_text = "none: n = 1"
    if metric_comparison.low is not None and metric_comparison.high is not None:
        interval_text = f"{notation.format_number(metric_comparison.low)} to {notation.format_number(metric_comparison.high)}"
    return [
        metric_comparison.metric,
        verdict_text.format_quantity(metric_comparison.a, metric_comparison.unit),
        verdict_text.format_quantity(metric_comparison.b, metric_comparison.unit),
        notation.format_number(metric_comparison.ratio) if metric_comparison.ratio is not None else "",
        interval_text,
        f"{metric_comparison.n_a}, {metric_comparison.n_b}",
        metric_comparison.verdict,
    ]


def _make_side_title(side: ComparedSide) -> str:
    return f"{side.name}: {side.matrix}{': ' + side.title if side.title else ''}"
