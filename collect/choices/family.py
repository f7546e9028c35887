"""Answers which strategy to choose for a workload, as a decision tree. Contests with the same answer are one branch of the
tree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec

from collect.choices.contest import UNRANKED, Contender, Contest, contenders, grounds, natural
from collect.choices.standing import CRITERIA, SENT, Standing, Word, standings
from collect.findings.row import CellRow
from collect.verdicts.selection import Measurements

Chosen = Word | Literal["only one fits", "only one", "none fits", "not measured"]


class Fit(msgspec.Struct):
    """Which cells fit into memory, in some contests of a family. Cells are given by name."""

    contests: list[int]  # indexes in `Family.contests`
    fits: list[str]  # these cells completed
    does_not_fit: list[str]  # these cells ran out of memory
    over_the_limit: list[str]  # these cells ran into the time limit
    unknown: list[str]  # these cells failed or were not measured


class Answer(msgspec.Struct):
    """The best cells by one criterion. They are the same in all contests that `contests` lists."""

    contests: list[int]  # indexes in `Family.contests`
    word: Chosen  # how certain the choice is (`Standing.word`); if no cells were ranked: the reason, such as `only one`
    best: list[str]  # names of the best cells


class CriterionChoice(msgspec.Struct):
    """A criterion, and its best cells in the contests of a family. Contests with the same best cells share one answer."""

    criterion: str  # name of a metric
    answers: list[Answer]  # each answer is valid for the contests that it names


class Family(msgspec.Struct):
    """Cells of a workload that differ only in ranks, batch size, and the way in which the ranks share the work."""

    workload: str  # name of the workload
    about: str  # in words, the values that distinguish this family from other families of the workload
    contests: list[Contest]  # ordered by number of ranks
    one_rank: list[Fit]  # which cells fit into memory on one rank
    more_ranks: list[Fit]  # which cells fit into memory on several ranks
    questions: list[CriterionChoice]  # one for each criterion by which the cells of at least one contest are ranked

    @property
    def open(self) -> bool:
        """Whether a reader can choose between cells in any contest of the family (`Contest.open`)."""
        return any(contest.open for contest in self.contests)


def choose(measurements: Measurements) -> list[Family]:
    """The families of a matrix. A family is a set of cells of one workload that can be compared."""
    return [_family(measurements, *ground) for ground in grounds(measurements.rows)]


def _family(measurements: Measurements, workload: str, about: str, rows: dict[tuple[int, int, int], list[CellRow]]) -> Family:
    contests = []
    for (ranks, nodes, batch), members in rows.items():
        known = contenders(members)
        able = {contender.cell for contender in known if contender.outcome == "measured"}
        ranked = standings(measurements, [row for row in members if row.id in able])
        contests.append(Contest(ranks, nodes, batch, known, ranked))
    alone = [place for place, contest in enumerate(contests) if contest.ranks == 1]
    shared = [place for place, contest in enumerate(contests) if contest.ranks > 1]
    asked = [name for name in CRITERIA if any(name == one.criterion for contest in contests for one in contest.standings)]
    questions = [_question(contests, name) for name in asked]
    return Family(workload, about, contests, _fits(contests, alone), _fits(contests, shared), questions)


def _fits(contests: Sequence[Contest], places: Sequence[int]) -> list[Fit]:
    """Which cells fit into memory in some contests. Contests in which the same cells do not fit, or may not fit, are grouped.

    contests: all contests of a family. places: the indexes in `contests` of the contests that are considered.
    """
    found: dict[Hashable, Fit] = {}
    for place in places:
        fits: list[str] = []
        rest = Fit([], [], [], [], [])
        for contender in contests[place].contenders:
            _sort_in(contender, fits, rest)
        one = found.setdefault((bool(fits), *map(tuple, (rest.does_not_fit, rest.over_the_limit, rest.unknown))), rest)
        one.contests.append(place)
        one.fits = sorted({*one.fits, *fits}, key=natural)
    return list(found.values())


def _sort_in(contender: Contender, fits: list[str], rest: Fit) -> None:
    """Add the name of a contender to `fits` if it fits into memory, and otherwise to the list of `rest` for its outcome.

    A measured cell fits, even if it is not ranked. A cell that ran out of memory in any repeat does not fit.
    """
    if "oom" in contender.partly:
        rest.does_not_fit.append(contender.name)
    elif contender.outcome in ("measured", *UNRANKED):
        fits.append(contender.name)
    elif contender.outcome == "does not fit":
        rest.does_not_fit.append(contender.name)
    elif contender.outcome == "over the limit":
        rest.over_the_limit.append(contender.name)
    else:
        rest.unknown.append(contender.name)


def _question(contests: Sequence[Contest], criterion: str) -> CriterionChoice:
    found: dict[Hashable, Answer] = {}
    for place, contest in enumerate(contests):
        if criterion == SENT and contest.ranks == 1:
            continue  # one rank sends nothing, so no strategy can be chosen by the sent bytes
        answer = _answer(contest, criterion)
        alike = found.setdefault((answer.word, () if answer.word in ("only one", "same work") else tuple(answer.best)), answer)
        alike.contests.append(place)
        alike.best = sorted({*alike.best, *answer.best}, key=natural)
    return CriterionChoice(
        criterion, sorted(found.values(), key=lambda answer: answer.word in ("only one", "none fits", "not measured"))
    )


def _answer(contest: Contest, criterion: str) -> Answer:
    standing: Standing | None = next((one for one in contest.standings if one.criterion == criterion), None)
    if standing is not None:
        names = {contender.cell: contender.name for contender in contest.contenders}
        return Answer([], standing.word, sorted((names[cell] for cell in standing.best), key=natural))
    measured, too_big = contest.named("measured"), contest.named("does not fit")
    if len(measured) != 1:
        return Answer([], "none fits" if len(too_big) == len(contest.contenders) else "not measured", [])
    return Answer([], "only one fits" if 0 < len(too_big) == len(contest.contenders) - 1 else "only one", measured)
