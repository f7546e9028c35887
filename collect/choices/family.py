"""Answers which strategy to choose for a workload. Contests with the same answer share it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec

from collect.choices import contest as contest_groups
from collect.choices.contest import Contender, Contest, make_natural_sort_key
from collect.choices.standing import CRITERIA, SENT_BYTES_METRIC, Standing, StandingWord, rank_cells
from collect.findings.row import CellRow
from collect.verdicts.selection import Measurements

ChoiceWord = StandingWord | Literal["only one fits", "only one", "none fits", "not measured"]


class MemoryFit(msgspec.Struct):
    """Which cells fit into memory, in some contests of a family. Cells are given by name."""

    contests: list[int]
    """The contests in which it is so, as indexes in `ChoiceFamily.contests`."""
    fits: list[str]
    """These cells completed."""
    does_not_fit: list[str]
    """These cells ran out of memory."""
    over_the_limit: list[str]
    """These cells ran into the time limit."""
    unknown: list[str]
    """These cells failed or were not measured."""


class CriterionAnswer(msgspec.Struct):
    """The best cells by one criterion. They are the same in all contests that `contests` lists."""

    contests: list[int]
    """The contests in which it is so, as indexes in `ChoiceFamily.contests`."""
    word: ChoiceWord
    """How certain the choice is (`Standing.word`); if no cells were ranked: the reason, such as `only one`."""
    best: list[str]
    """Names of the best cells."""


class CriterionChoice(msgspec.Struct):
    """A criterion, and its best cells in the contests of a family. Contests with the same best cells share one answer."""

    criterion: str
    """Name of a metric."""
    answers: list[CriterionAnswer]
    """Each answer is valid for the contests that it names."""


class ChoiceFamily(msgspec.Struct):
    """Cells of a workload that differ only in ranks, batch size, and the way in which the ranks share the work."""

    workload: str
    """Name of the workload."""
    about: str
    """In words, the values that distinguish this family from other families of the workload."""
    contests: list[Contest]
    """Ordered by number of ranks."""
    one_rank: list[MemoryFit]
    """Which cells fit into memory on one rank."""
    more_ranks: list[MemoryFit]
    """Which cells fit into memory on several ranks."""
    questions: list[CriterionChoice]
    """One for each criterion by which the cells of at least one contest are ranked."""

    @property
    def has_choice(self) -> bool:
        """Whether a reader can choose between cells in any contest of the family (`Contest.has_choice`)."""
        return any(contest.has_choice for contest in self.contests)


def choose_strategies(measurements: Measurements) -> list[ChoiceFamily]:
    """The families of a matrix."""
    return [_build_choice_family(measurements, *group) for group in contest_groups.group_comparable_cells(measurements.rows)]


def _build_choice_family(
    measurements: Measurements, workload: str, values: str, rows_by_contest: dict[tuple[int, int, int], list[CellRow]]
) -> ChoiceFamily:
    contests = []
    for (rank_count, node_count, batch_size), contest_rows in rows_by_contest.items():
        contenders = contest_groups.list_contenders(contest_rows)
        measured_ids = {contender.cell for contender in contenders if contender.outcome == "measured"}
        standings = rank_cells(measurements, [row for row in contest_rows if row.id in measured_ids])
        contests.append(Contest(rank_count, node_count, batch_size, contenders, standings))
    one_rank_indexes = [index for index, contest in enumerate(contests) if contest.ranks == 1]
    more_rank_indexes = [index for index, contest in enumerate(contests) if contest.ranks > 1]
    criterion_names = [
        name for name in CRITERIA if any(name == entry.criterion for contest in contests for entry in contest.standings)
    ]
    questions = [_build_criterion_choice(contests, name) for name in criterion_names]
    return ChoiceFamily(
        workload, values, contests, _group_fits(contests, one_rank_indexes), _group_fits(contests, more_rank_indexes), questions
    )


def _group_fits(contests: Sequence[Contest], contest_indexes: Sequence[int]) -> list[MemoryFit]:
    """Which cells fit into memory in some contests. Contests in which the same cells do not fit, or may not fit, are grouped.

    contests: all contests of a family. contest_indexes: the indexes in `contests` of the contests that are considered.
    """
    fits_by_names: dict[Hashable, MemoryFit] = {}
    for contest_index in contest_indexes:
        new_fit = MemoryFit([], [], [], [], [])
        for contender in contests[contest_index].contenders:
            getattr(new_fit, _find_fit(contender)).append(contender.name)
        other_names = (new_fit.does_not_fit, new_fit.over_the_limit, new_fit.unknown)
        shared_fit = fits_by_names.setdefault((bool(new_fit.fits), *map(tuple, other_names)), new_fit)
        shared_fit.contests.append(contest_index)
        shared_fit.fits = sorted({*shared_fit.fits, *new_fit.fits}, key=make_natural_sort_key)
    return list(fits_by_names.values())


def _find_fit(contender: Contender) -> str:
    """The name of the list of `MemoryFit` that a contender belongs to.

    A measured cell fits, even if it is not ranked. A cell that ran out of memory in any repeat does not fit.
    """
    if "oom" in contender.partly:
        return "does_not_fit"
    if contender.outcome in ("measured", *contest_groups.UNRANKED_OUTCOMES):
        return "fits"
    return {"does not fit": "does_not_fit", "over the limit": "over_the_limit"}.get(contender.outcome, "unknown")


def _build_criterion_choice(contests: Sequence[Contest], criterion: str) -> CriterionChoice:
    answer_by_best: dict[Hashable, CriterionAnswer] = {}
    for contest_index, contest in enumerate(contests):
        if criterion == SENT_BYTES_METRIC and contest.ranks == 1:
            continue  # one rank sends nothing, so no strategy can be chosen by the sent bytes
        answer = _answer_contest(contest, criterion)
        best_names = () if answer.word in ("only one", "same work") else tuple(answer.best)
        equal_answer = answer_by_best.setdefault((answer.word, best_names), answer)
        equal_answer.contests.append(contest_index)
        equal_answer.best = sorted({*equal_answer.best, *answer.best}, key=make_natural_sort_key)
    return CriterionChoice(
        criterion, sorted(answer_by_best.values(), key=lambda answer: answer.word in ("only one", "none fits", "not measured"))
    )


def _answer_contest(contest: Contest, criterion: str) -> CriterionAnswer:
    standing: Standing | None = next((candidate for candidate in contest.standings if candidate.criterion == criterion), None)
    if standing is not None:
        names = {contender.cell: contender.name for contender in contest.contenders}
        return CriterionAnswer([], standing.word, sorted((names[cell] for cell in standing.best), key=make_natural_sort_key))
    measured_names, unfitting_names = contest.contender_names("measured"), contest.contender_names("does not fit")
    if len(measured_names) != 1:
        return CriterionAnswer([], "none fits" if len(unfitting_names) == len(contest.contenders) else "not measured", [])
    return CriterionAnswer(
        [], "only one fits" if 0 < len(unfitting_names) == len(contest.contenders) - 1 else "only one", measured_names
    )
