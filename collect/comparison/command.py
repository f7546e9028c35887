"""`collect compare`: shows which cells of two matrices have different results, and possible reasons for the differences."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collect import notation
from collect.archiving import command as archiving
from collect.comparison.compare import ComparedMatrix, Comparison, MetricComparison, Side, compare, distinguished
from collect.reading.load import load
from collect.report import verdict_text
from collect.summary import summarize
from shardlab.errors import InputError
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

MOST_VALUES = 6  # the most values of a key that a sentence lists
SHOWN = ("throughput_per_s", "step_time_ms", "peak_memory_bytes", "final_loss", "final_accuracy_pct")
# Verdict on B, compared with A -> colour of the row.
STYLES = {"faster": "green", "slower": "red", "higher": "yellow", "lower": "yellow"}


def show(workspace: Workspace, a: str, b: str, matrix: str | None, output: Output) -> int:
    """Compare two sets of results, called A and B, and print tables or the JSON document. Returns the exit code.

    a, b: where A and B are, each as the name of a matrix of `workspace`, the folder of another workspace, or an archive.
    matrix: which matrix of the other workspaces is compared; None: their last matrix. Raises InputError if `a` or `b` is
    neither a matrix nor a folder nor an archive.
    """
    with contextlib.ExitStack() as opened:
        sides = [_open(workspace, name, matrix, opened) for name in (a, b)]
        compared = []
        for name, (place, wanted) in zip((a, b), sides, strict=True):
            loaded = load(place, wanted)
            compared.append(ComparedMatrix(name, place, loaded, summarize(loaded, loaded.expansion.baseline)))
        comparison = compare(*compared)
    _show(output, comparison)
    output.document(comparison)
    return 0


def _open(workspace: Workspace, name: str, matrix: str | None, opened: contextlib.ExitStack) -> tuple[Workspace, str | None]:
    """Find the workspace that contains one of the two sets of results. Returns (workspace, name of the matrix; None: the last
    one).

    name: the name of a matrix of `workspace`, the folder of a workspace, or an archive. opened: if `name` is an archive, its
    files stay unpacked in a temporary folder until `opened` is closed.
    """
    if name in workspace.expansions():
        if matrix is not None:
            raise InputError(f"--matrix: {name} is itself a matrix. Allowed: --matrix only if A and B are both workspaces.")
        return workspace, name
    if Path(name).is_file():
        return opened.enter_context(archiving.as_workspace(Path(name))), matrix
    if not Path(name).is_dir():
        known = ", ".join(workspace.expansions()) or "none here"
        raise InputError(
            f"{name}: is neither a matrix of this workspace nor a folder nor a file. Allowed: a folder, an archive, or "
            f"a matrix ({known})."
        )
    return Workspace(Path(name)), matrix


def _show(output: Output, found: Comparison) -> None:
    for letter, side in (("A", found.a), ("B", found.b)):
        output.line(f"{letter}: {_named(side)}")
    for remark in dict.fromkeys((*found.a.remarks, *found.b.remarks)):
        of = [letter for letter, side in (("A", found.a), ("B", found.b)) if remark in side.remarks]
        output.line(f"{' and '.join(of)}: {remark}", style="yellow")
    _pairs(output, found)
    for one in found.differs:
        said = [verdict_text.plain(value) for value in (one.a, one.b)]
        output.line(f"cells were matched although {one.key} differs: {said[0]} in A, {said[1]} in B", style="yellow")
    for letter, labels in (("A", found.only_a), ("B", found.only_b)):
        if labels:
            output.line(f"only in {letter}: {'; '.join(labels)}")
    if found.environment:
        rows = [[one.what, ", ".join(one.a), ", ".join(one.b)] for one in found.environment]
        output.table("what else differs (possible reasons; it is not proven that they are the cause)", ["", "A", "B"], rows)
    elif found.pairs:
        output.line("as far as it is known, the common cells ran on equal machines, with the same software and commit")


def _pairs(output: Output, found: Comparison) -> None:
    if not found.pairs:
        output.line(f"no cell is in both A and B{_why_none(found)}.", style="yellow")
        return
    rows, styles, more = [], [], []
    for pair in found.pairs:
        if pair.different_work:
            rows.append([pair.label, "", "", "", "", "", "", "different work"])
            styles.append("yellow")
            continue
        order = {one.metric: one for one in pair.metrics}
        shown = [order[name] for name in (*SHOWN, *(order if output.verbose else ())) if name in order]
        shown = list(dict.fromkeys(shown))
        more += [f"{pair.label}: {one.metric} {one.verdict}" for one in distinguished(pair.metrics) if one not in shown]
        rows += [[pair.label, *_row(one)] for one in shown]
        styles += [STYLES.get(one.verdict, "") for one in shown]
        if not pair.metrics:
            rows.append([pair.label, "", pair.state_a, pair.state_b, "", "", "", "no metric in both"])
            styles.append("dim")
    output.table("", ["Cell", "Metric", "A", "B", "B / A", "95 % interval", "n", "B is"], rows, styles)
    remarks: dict[str, list[str]] = {}
    for pair in found.pairs:
        for said in filter(None, (pair.different_work, *pair.remarks)):
            remarks.setdefault(said, []).append(pair.label)
    for said, labels in remarks.items():
        output.line(f"{said}: {'all cells' if len(labels) == len(found.pairs) > 1 else '; '.join(labels)}", style="yellow")
    for why in dict.fromkeys(one.why for pair in found.pairs for one in pair.metrics if one.why):
        output.line(f"no interval: {why}")
    if more:
        output.line(f"other metrics that differ (--verbose shows all metrics): {'; '.join(more)}")
    if found.by_chance:
        told = sum(len(distinguished(pair.metrics)) for pair in found.pairs)
        expected = notation.number(found.by_chance, 2)
        output.line(f"{told} of all metrics differ at the 95 % level; about {expected} would differ by chance alone")


def _why_none(found: Comparison) -> str:
    """The reason why no cell is in both A and B, such as `: steps is 5 in A and 10 in B`; '' if the reason is not known."""

    def said(values: Sequence[Any]) -> str:
        few = [verdict_text.plain(value) or "none" for value in values[:MOST_VALUES]]
        return ", ".join([*few, *(["..."] if len(values) > MOST_VALUES else [])])

    keys = [f"{one.key} is {said(one.a)} in A and {said(one.b)} in B" for one in found.apart]
    if not keys:
        return ": no single key explains the difference" if found.only_a and found.only_b else ""
    return f": {'; '.join(keys)}"


def _row(figure: MetricComparison) -> list[str]:
    interval = "none"
    if 1 in (figure.n_a, figure.n_b) and figure.verdict == "undecided":
        interval = "none: n = 1"
    if figure.low is not None and figure.high is not None:
        interval = f"{notation.number(figure.low)} to {notation.number(figure.high)}"
    return [
        figure.metric,
        verdict_text.quantity(figure.a, figure.unit),
        verdict_text.quantity(figure.b, figure.unit),
        notation.number(figure.ratio) if figure.ratio is not None else "",
        interval,
        f"{figure.n_a}, {figure.n_b}",
        figure.verdict,
    ]


def _named(side: Side) -> str:
    return f"{side.name}: {side.matrix}{': ' + side.title if side.title else ''}"
