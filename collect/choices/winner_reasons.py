"""Explains why the fastest cell of a contest is faster than the next, from the traces of both."""

from __future__ import annotations

from collections.abc import Sequence

from collect.choices.contest import Contest
from collect.choices.family import ChoiceFamily
from collect.findings.trace_answers import CellDifference, compare_steps_with_baseline
from collect.reading.load import LoadedMatrix

_SPEED_METRIC = "throughput_per_s"
_MOST_PARTS = 3  # the most parts of a step that a reason names
_LEAST_SHARE_PCT = 5  # a part with a smaller share of the difference is not named


def explain_winners(loaded: LoadedMatrix, families: Sequence[ChoiceFamily]) -> list[CellDifference]:
    """The difference between the steps of the two cells of `find_rivals`, for each contest in which both were profiled."""
    cell_by_id = {cell.id: cell for cell in loaded.cells}
    rival_pairs = dict.fromkeys(pair for family in families for contest in family.contests if (pair := find_rivals(contest)))
    return [
        CellDifference(winner, rival, step_difference)
        for winner, rival in rival_pairs
        if (step_difference := compare_steps_with_baseline(cell_by_id[winner], cell_by_id[rival])) is not None
    ]


def find_rivals(contest: Contest) -> tuple[str, str] | None:
    """The ids of the fastest cell and of the fastest cell that is not among the best; None if no cell is slower."""
    standing = next((standing for standing in contest.standings if standing.criterion == _SPEED_METRIC), None)
    rival_id = next((entry.cell for entry in standing.placed if entry.cell not in standing.best), None) if standing else None
    return (standing.placed[0].cell, rival_id) if standing and rival_id is not None else None


def write_reason(contest: Contest, reasons: Sequence[CellDifference]) -> str:
    """Which parts of a step make the fastest cell faster, such as `less time in compute, 80 % of the difference`.

    "" if the traces do not say it, also because the profiled steps of the fastest cell are not shorter.
    """
    rival_ids = find_rivals(contest)
    step_difference = next((entry.step for entry in reasons if (entry.cell, entry.baseline) == rival_ids), None)
    if step_difference is None or step_difference.difference_ns >= 0:
        return ""
    label_and_share = [(part.label, 100 * part.difference_ns / step_difference.difference_ns) for part in step_difference.parts]
    named_parts = [f"{label}, {share:.0f} %" for label, share in label_and_share if share >= _LEAST_SHARE_PCT][:_MOST_PARTS]
    return f"less time in {'; '.join(named_parts)} of the difference between profiled steps" if named_parts else ""
