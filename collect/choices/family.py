"""Which strategy to choose for a workload: its contests, and a decision tree that groups their answers."""

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
    """What is known of memory in some contests (places in the family's list): names of those that ended, and how."""

    contests: list[int]
    fits: list[str]
    does_not_fit: list[str]
    over_the_limit: list[str]
    unknown: list[str]  # failed, or not measured


class Answer(msgspec.Struct):
    """The choice by one criterion, the same in all these contests. best: names of the best cells; word: of the standing, or,
    without a standing, `only one fits`, `only one` (only one cell was measured), `none fits` or `not measured`."""

    contests: list[int]
    word: Chosen
    best: list[str]


class CriterionChoice(msgspec.Struct):
    """A criterion, with the answers that differ."""

    criterion: str
    answers: list[Answer]


class Family(msgspec.Struct):
    """A workload trained alike but for ranks and batch. about: what tells it from others of the workload; contests: by ranks.

    one_rank, more_ranks: what fits; questions: by each criterion that ranks anything here.
    """

    workload: str
    about: str
    contests: list[Contest]
    one_rank: list[Fit]
    more_ranks: list[Fit]
    questions: list[CriterionChoice]

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return any(contest.open for contest in self.contests)


def choose(measurements: Measurements) -> list[Family]:
    """Every workload of a matrix, as far as its rows can be compared."""
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
    """Contests in one answer where the same did not fit, or is not known to."""
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
    """A cell of other work fits too; one that was out of memory in some of its repeats does not."""
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
            continue  # nothing is sent
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
