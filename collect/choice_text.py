"""What to choose, as text, written once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect import verdict_text
from collect.choices.contest import Contest, natural
from collect.choices.family import Answer, Family, Fit
from collect.choices.standing import CRITERIA, Placed, Standing
from collect.summary import Summary

CAUTION = "choices of a rehearsal show that a choice can be derived, not what to choose"
HEADINGS = {
    "throughput_per_s": "Fastest",
    "peak_memory_bytes": "Least memory a rank",
    "sent_counted_bytes": "Fewest bytes a step",
    "final_accuracy_pct": "Most accurate",
    "energy_per_unit_j": "Least energy",
}
QUESTIONS = {
    "throughput_per_s": "Which is the fastest?",
    "peak_memory_bytes": "Which needs the least memory a rank?",
    "sent_counted_bytes": "Which sends the fewest bytes a step?",
    "final_accuracy_pct": "Which is the most accurate?",
    "energy_per_unit_j": "Which needs the least energy a unit?",
}
MOST_NAMED = 4  # in a cell of the table; the questions name all


class Link(msgspec.Struct, frozen=True):
    """A text that leads to the runs of a cell."""

    text: str
    cell: str


class Said(msgspec.Struct, frozen=True):
    """A choice. names: those that it is among, or the few that a table holds; value: of the first; more: how sure that is.

    sure: whether one was told apart from all others, or some are known to be equal.
    """

    names: list[Link]
    value: str = ""
    more: str = ""
    sure: bool = False

    def __str__(self) -> str:
        told = " ".join(filter(None, [", ".join(link.text for link in self.names), self.value]))
        return f"{told} ({self.more})" if told and self.more else told or self.more


class Line(msgspec.Struct, frozen=True):
    """A contest as a line of the table of choices. said: by each criterion of its table; out: who is not ranked, and why."""

    heading: str
    about: str
    said: list[Said]
    out: list[tuple[str, list[Link]]]


class Node(msgspec.Struct, frozen=True):
    """A question and its answers, as they stand in a list. when: the contests that an answer is of."""

    asks: str
    answers: list[tuple[str, Said, list[Link]]]


def opened(summary: Summary) -> list[Family]:
    """Those in which there is something to choose."""
    return [family for family in summary.choices if family.open]


def criteria(families: Sequence[Family]) -> list[str]:
    """Those by which anything is ranked, in their order."""
    found = {question.criterion for family in families for question in family.questions}
    return [name for name in CRITERIA if name in found]


def title(family: Family) -> str:
    return f"{family.workload}, {family.about}" if family.about else family.workload


def lines(family: Family, shown: Sequence[str]) -> list[Line]:
    """Its contests in which there is something to choose, by the criteria that are shown."""
    return [
        Line(_ranks(contest.ranks), _about(family, contest), [_said(contest, name) for name in shown], _out(contest))
        for contest in family.contests
        if contest.open
    ]


def nodes(family: Family) -> list[Node]:
    """The questions of a family, in the order in which to ask them."""
    several = len(family.one_rank) > 1
    alone = [
        (_batches(family, fit.contests) if several else "", _on_one(fit), _cites(family, fit.contests, _of(fit)))
        for fit in family.one_rank
    ]
    shared = [(_when(family, fit.contests), _on_more(fit), _cites(family, fit.contests, _of(fit))) for fit in family.more_ranks]
    asked = [Node("Does it fit one rank?", alone or [("", Said([], more="not measured on one rank"), [])])]
    asked.append(Node("What fits more ranks?", shared or [("", Said([], more="not measured on more than one"), [])]))
    for question in family.questions:
        told = [(_when(family, one.contests), *_answer(family, one, question.criterion)) for one in question.answers]
        asked.append(Node(QUESTIONS[question.criterion], told))
    return asked


def _said(contest: Contest, criterion: str) -> Said:
    """The answer of a contest in a cell of the table."""
    standing = next((one for one in contest.standings if one.criterion == criterion), None)
    if standing is None:
        measured = contest.named("measured")
        return Said([], more=f"only {measured[0]} was measured" if len(measured) == 1 else "")
    names = {contender.cell: contender.name for contender in contest.contenders}
    best = sorted((Link(names[cell], cell) for cell in standing.best), key=lambda link: natural(link.text))
    placed = {one.cell: one for one in standing.placed}
    if standing.word == "same work":
        return Said([], more="alike: the same work")
    if standing.word == "not told apart":
        values = [placed[link.cell].value for link in best]
        within = verdict_text.interval(min(values), max(values), standing.unit)
        many = len(best) > MOST_NAMED
        return Said([] if many else best, within, f"{len(best)} that cannot be told apart" if many else "cannot be told apart")
    first = standing.placed[0]
    margin = _margin(standing, names)
    if standing.word == "as measured":
        return Said(best, _value(first, standing), "; ".join(filter(None, ["measured once, scatter unknown", margin])))
    return Said(best, _value(first, standing), "; ".join(filter(None, ["equal" if len(best) > 1 else "", margin])), sure=True)


def _margin(standing: Standing, names: dict[str, str]) -> str:
    """`13 % faster than ddp`, of the first that is not among the best."""
    behind = next((one for one in standing.placed if one.cell not in standing.best), None)
    if behind is None or standing.margin_pct is None:
        return ""
    how = {"throughput_per_s": "faster", "final_accuracy_pct": "more"}.get(standing.criterion, "less")
    return f"{_percent(standing.margin_pct)} % {how} than {names[behind.cell]}"


def _percent(value: float) -> str:
    """Two digits, or whole percent: a margin is of two means, and known no better."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.1g}"


def _value(placed: Placed, standing: Standing) -> str:
    return verdict_text.quantity(placed.value, standing.unit)


def _out(contest: Contest) -> list[tuple[str, list[Link]]]:
    """(why, who) of those that are not among the ranked."""
    words = {
        "does not fit": "out of memory",
        "over the limit": "over the time limit",
        "not ranked": "not proven to do the same work",
        "failed": "failed",
        "not measured": "not measured",
    }
    found = []
    for outcome, why in words.items():
        who = [Link(one.name, one.cell) for one in contest.contenders if one.outcome == outcome]
        found += [(why, who)] if who else []
    return found + [(one.partly, [Link(one.name, one.cell)]) for one in contest.contenders if one.partly]


def _on_one(fit: Fit) -> Said:
    if fit.fits and not fit.does_not_fit:
        return Said([], value="yes", more=_rest(fit), sure=True)
    if fit.fits:
        return Said([], value=f"yes with {_joined(fit.fits)}", more=_rest(fit), sure=True)
    return Said([], value="no", more=_rest(fit), sure=True) if fit.does_not_fit else Said([], more=_rest(fit))


def _on_more(fit: Fit) -> Said:
    return Said([], value=_joined(fit.fits), more=_rest(fit), sure=bool(fit.fits))


def _rest(fit: Fit) -> str:
    ended = (
        (fit.does_not_fit, "out of memory"),
        (fit.over_the_limit, "over the time limit"),
        (fit.unknown, "not measured, or failed"),
    )
    return "; ".join(f"{_joined(names)}: {how}" for names, how in ended if names)


def _of(fit: Fit) -> list[str]:
    return [*fit.fits, *fit.does_not_fit, *fit.over_the_limit, *fit.unknown]


def _answer(family: Family, answer: Answer, criterion: str) -> tuple[Said, list[Link]]:
    """The choice in the words of the tree, and the numbers that it rests on: the best of each contest."""
    more = {
        "best": "",
        "equal": "equal",
        "not told apart": "cannot be told apart",
        "same work": "alike: proven to do the same work, so that accuracy is no reason to choose",
        "as measured": "ahead as measured once; the scatter is unknown",
        "only one fits": "the only one that fits",
        "only one": "the only one measured",
        "not measured": "not measured",
    }[answer.word]
    cites = []
    for place in answer.contests:
        contest = family.contests[place]
        cells = {contender.name: contender.cell for contender in contest.contenders}
        standing = next((one for one in contest.standings if one.criterion == criterion), None)
        placed = {one.cell: one for one in standing.placed} if standing else {}
        for name in answer.best:
            cell = cells[name]
            value = _value(placed[cell], standing) if standing and cell in placed else name
            cites.append(Link(value, cell))
    return Said([], _joined(answer.best), more, sure=answer.word in ("best", "equal", "only one fits")), cites


def _cites(family: Family, places: Sequence[int], names: Sequence[str]) -> list[Link]:
    """The cells of these names in these contests, by their ranks."""
    found = []
    for place in places:
        contest = family.contests[place]
        known = [contender for contender in contest.contenders if contender.name in names]
        found += [Link(f"{contender.name} ×{contest.ranks}", contender.cell) for contender in known]
    return found


def _joined(names: Sequence[str]) -> str:
    """`a, b and c`; `a (4 and 8 micro-batches)` for two of a strategy; with semicolons where commas are taken."""
    by_strategy: dict[str, list[str]] = {}
    for name in names:
        strategy, _, more = name.partition(", ")
        by_strategy.setdefault(strategy, []).append(more)
    folded = [
        strategy if variants == [""] else f"{strategy} ({_variants(variants)})" for strategy, variants in by_strategy.items()
    ]
    comma = "; " if any("," in name for name in folded) else ", "
    return " and ".join(filter(None, [comma.join(folded[:-1]), *folded[-1:]]))


def _variants(variants: Sequence[str]) -> str:
    """`4 and 8 micro-batches`: what all end with stands once."""
    heads, tails = zip(*(variant.partition(" ")[::2] for variant in variants), strict=True)
    return f"{_joined(heads)} {tails[0]}".rstrip() if len(set(tails)) == 1 else "; ".join(variants)


def _batches(family: Family, places: Sequence[int]) -> str:
    return f"batch {_joined([str(family.contests[place].batch) for place in places])}"


def _when(family: Family, places: Sequence[int]) -> str:
    """`2 and 4 ranks; 8 ranks at batch 64`: the ranks of contests, with the batch where others on as many answer otherwise."""
    by_ranks: dict[tuple[int, int], list[int]] = {}
    for place in places:
        contest = family.contests[place]
        by_ranks.setdefault((contest.ranks, contest.nodes), []).append(contest.batch)
    whole, parts = [], []
    for (ranks, nodes), batches in by_ranks.items():
        everywhere = [one.batch for one in family.contests if (one.ranks, one.nodes) == (ranks, nodes)]
        other_nodes = len({one.nodes for one in family.contests if one.ranks == ranks}) > 1
        if batches == everywhere and not other_nodes:
            whole.append(ranks)
            continue
        on = f" on {nodes} node{'s' if nodes > 1 else ''}" if other_nodes else ""
        at = f" at batch {_joined([str(batch) for batch in batches])}" if batches != everywhere else ""
        parts.append(f"{_ranks(ranks)}{on}{at}")
    said = [f"{_joined([str(ranks) for ranks in whole])} rank{'s' if whole != [1] else ''}"] if whole else []
    return "; ".join([*said, *parts])


def _ranks(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _about(family: Family, contest: Contest) -> str:
    """The batch, and the nodes where they tell contests apart."""
    nodes = f"{contest.nodes} nodes, " if contest.nodes > 1 else ""
    return f"{nodes}batch {contest.batch}"
