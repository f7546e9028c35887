"""Draws the speed-up over the number of ranks, for strategies that were measured on several numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collect.drawing import small_multiples
from collect.drawing.series import group_alike, line_labels, line_variants
from collect.figure import MOST_SHOWN, MUTED, CellMark, Figure, Group, axis, layout
from collect.strategy_style import variant_looks

NAME = "speed_up"
# Keys in which the cells of a line may differ: the number of ranks, and keys that depend on it or say how ranks share a batch.
SIZES = ("gpus", "nnodes", "dp", "tp", "pp", "servers", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps")


def draw(group: Group) -> Figure | None:
    """Draw one line for each set of cells that differ only in their ranks.

    The cells of a line have the same global batch size (strong scaling) or the same batch size per rank (weak scaling). None if
    no line would have more than one point.
    """
    lines = _group_lines([mark for mark in group.marks if NAME in mark.row.metrics], group.baseline)
    if not any(_count_distinct_ranks(marks) > 1 for marks in lines.values()):
        return None
    looks, names = variant_looks([marks[0].strategy for marks in lines.values()]), _line_names(lines)
    panels = small_multiples.divide_lines(
        [marks[0] for marks in lines.values()], names, line_variants(_labelled_marks(lines), SIZES)
    )
    data: list[dict[str, Any]] = []
    for index, (name, ((_, batch), marks)) in enumerate(zip(names, lines.items(), strict=True)):
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [mark.cell.cell.gpus for mark in marks],
                "meta": [mark.row.id for mark in marks],
                "y": [mark.row.metrics[NAME].value for mark in marks],
                "line": looks[index].line,
                "marker": looks[index].marks(8),
                "visible": True if index < MOST_SHOWN else "legendonly",
                "hovertemplate": f"%{{y:.3~g}}x on %{{x}} ranks, {batch}",
            }
        )
    rank_counts = sorted({mark.cell.cell.gpus for marks in lines.values() for mark in marks})
    data += _ideal_line(group, rank_counts)
    y = axis(f"speed-up relative to {group.baseline} (x)", rangemode="tozero")
    figure_layout = layout(axis("ranks", tickvals=sorted({*rank_counts, *data[-1]["x"]}), showgrid=False), y, showlegend=True)
    caption = "Ratio of mean throughputs. Dotted: ideal scaling, in proportion to the ranks."
    figure = Figure(NAME, "Scaling", caption, 380, data, figure_layout)
    return small_multiples.lines(figure, panels)


def _group_lines(marks: Sequence[CellMark], baseline: str) -> dict[tuple[int, str], list[CellMark]]:
    """The lines of the figure: {key of a line: cells of the line}.

    A key is (number of the set of cells that differ only in their ranks, text about the batch size that all cells of the line
    share, such as `batch 32 per rank`).

    A cell with as many ranks as its baseline is on lines of both kinds of scaling, strong and weak. A cell that is on no line
    is added at the end as a single point, unless it is a cell of the baseline strategy.
    """
    ranks_of = {mark.row.id: mark.cell.cell.gpus for mark in marks}
    all_lines: dict[tuple[int, str], list[CellMark]] = {}
    for number, family in enumerate(group_alike(marks, SIZES)):
        for mark in sorted(family, key=lambda mark: mark.cell.cell.gpus):
            cell, kind = mark.cell.cell, mark.row.metrics[NAME].kind
            is_both = ranks_of.get(mark.row.baseline or "") == cell.gpus
            if is_both or kind == "strong":
                all_lines.setdefault((number, f"batch {cell.global_batch_size}"), []).append(mark)
            if is_both or kind == "weak":
                all_lines.setdefault((number, f"batch {cell.gpu_batch_size} per rank"), []).append(mark)
    lines = {key: line for key, line in all_lines.items() if _count_distinct_ranks(line) > 1}
    drawn_ids = {mark.row.id for line in lines.values() for mark in line}
    for key, line in all_lines.items():
        if line[0].row.id not in drawn_ids and line[0].cell.cell.strategy != baseline:
            lines[key] = line
            drawn_ids |= {mark.row.id for mark in line}
    return lines


def _count_distinct_ranks(line: Sequence[CellMark]) -> int:
    return len({mark.cell.cell.gpus for mark in line})


def _line_names(lines: Mapping[tuple[int, str], Sequence[CellMark]]) -> list[str]:
    """The name of each line: the values in which the lines differ, without the number of ranks, and the batch size that is
    constant."""
    return [name.replace(" ×0", "", 1) for name in line_labels(_labelled_marks(lines), SIZES)]


def _labelled_marks(lines: Mapping[tuple[int, str], Sequence[CellMark]]) -> list[tuple[CellMark, dict[str, Any]]]:
    """For each line a cell, and the keys that its name shows besides the keys of the cell."""
    return [(marks[0], {"gpus": 0, "batch": batch}) for (_, batch), marks in lines.items()]


def _ideal_line(group: Group, rank_counts: list[int]) -> list[dict[str, Any]]:
    """The line of ideal scaling, in proportion to the number of ranks, with speed-up 1 at the smallest number of ranks of a
    baseline.

    Empty if the group has no baseline cell.
    """
    baselines = {mark.row.baseline for mark in group.marks}
    baseline_ranks = [mark.cell.cell.gpus for mark in group.marks if mark.row.id in baselines]
    if not baseline_ranks:
        return []
    end_ranks = [min(rank_counts[0], *baseline_ranks), rank_counts[-1]]
    line = {"color": MUTED, "width": 1.5, "dash": "dot"}
    y = [rank_count / min(baseline_ranks) for rank_count in end_ranks]
    return [{"type": "scatter", "mode": "lines", "name": "ideal", "x": end_ranks, "y": y, "line": line, "hoverinfo": "skip"}]
