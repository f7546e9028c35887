"""Writes the answers to "which strategy should I choose?" as text, which the terminal and the page of a report both use.

A family is a set of cells of one workload. A contest has those that ran on equal numbers of ranks and nodes with equal batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from collect.choices.contest import Contest, natural_sort_key
from collect.choices.family import ChoiceFamily, CriterionAnswer, MemoryFit
from collect.choices.standing import CRITERIA, EQUAL_TOLERANCE, Standing
from collect.figures.memory_parts import TensorMemory
from collect.metrics.memory import MEMORY_KINDS
from collect.report import verdict_text
from collect.summary import Summary
from shardlab.terminal import notation

CAUTION = "choices of a rehearsal show that a choice can be computed, not which strategy to choose"
AS_MEASURED = "as measured"
ONCE = "as measured: n = 1 and no cell was repeated, so the scatter is not known; another measurement may have another order"
HEADINGS = {
    "throughput_per_s": "Fastest",
    "peak_memory_bytes": "Least memory per rank",
    "sent_counted_bytes": "Fewest bytes per step",
    "final_accuracy_pct": "Most accurate",
    "energy_per_unit_j": "Least energy",
}
QUESTIONS = {
    "throughput_per_s": "Which is the fastest?",
    "peak_memory_bytes": "Which needs the least memory per rank?",
    "sent_counted_bytes": "Which sends the fewest bytes per step?",
    "final_accuracy_pct": "Which is the most accurate?",
    "energy_per_unit_j": "Which needs the least energy per unit?",
}
NO_TENSORS: Mapping[str, TensorMemory] = {}
PROCESS_QUESTION = "Which has the smallest process on a rank, with the interpreter and its libraries?"
MOST_SHOWN = 24  # the most families that a report shows, and the most contests that it shows of each family
MOST_CITED = 100  # the most cells that are listed under one answer
MOST_NAMED = 3  # if a contest has more best cells than this number, the table has one link for all of them together


class RunsLink(msgspec.Struct, frozen=True):
    """A link of the page to the runs of a cell."""

    text: str
    """The text of the link."""
    cell: str
    """The id of the cell."""


class ChoiceText(msgspec.Struct, frozen=True):
    """The text of a choice by one criterion."""

    names: list[RunsLink]
    """The best cells, each with a link to its runs."""
    value: str = ""
    """The value of the first of the best cells, with its unit."""
    remark: str = ""
    """How certain the choice is, such as "cannot be distinguished"."""
    margin: str = ""
    """How far the best cell is ahead of the first cell that is not among the best, such as "13 % faster than ddp"."""
    reason: str = ""
    """Why the best cell is the best, by the traces of the cells."""
    sure: bool = False
    """Whether one cell is significantly better than all others, or the best cells are known to be equal."""

    def __str__(self) -> str:
        text = " ".join(filter(None, [", ".join(link.text for link in self.names), self.value]))
        return f"{text} ({self.remark})" if text and self.remark else text or self.remark


class ChoiceRow(msgspec.Struct, frozen=True):
    """A contest as one row of the table of choices."""

    heading: str
    """The number of ranks, such as "8 ranks"."""
    batch_and_nodes: str
    """The batch size, and the number of nodes if the contest is on several nodes."""
    said: list[ChoiceText]
    """For each criterion that the table shows, the choice by this criterion."""
    out: list[tuple[str, list[RunsLink]]]
    """The cells of the contest that are not ranked, as (reason, cells)."""


class TreeNode(msgspec.Struct, frozen=True):
    """A question of the decision tree, with its answers."""

    asks: str
    """The question."""
    answers: list[tuple[str, ChoiceText, list[RunsLink]]]
    """For each answer (the contests for which the answer holds, as text; the answer; the cells from which it follows)."""


def shown_families(summary: Summary) -> list[ChoiceFamily]:
    """The families that a report shows: at most MOST_SHOWN families in which a reader has a choice."""
    return [choice_family for choice_family in summary.choices if choice_family.has_choice][:MOST_SHOWN]


def hidden_note(summary: Summary) -> str:
    """A sentence that says how many contests the report leaves out; "" if it shows all contests."""
    counts = [sum(contest.has_choice for contest in family.contests) for family in summary.choices if family.has_choice]
    left_count = sum(counts) - sum(min(count, MOST_SHOWN) for count in counts[:MOST_SHOWN])
    return f"{left_count:,} more comparisons are in summary.json" if left_count else ""


def differing_criteria(families: Sequence[ChoiceFamily]) -> list[str]:
    """The criteria by which cells differ in at least one contest of these families, in the order of CRITERIA."""
    standings = [standing for choice_family in families for contest in choice_family.contests for standing in contest.standings]
    differing = {standing.criterion for standing in standings if standing.word != "same work"}
    return [name for name in CRITERIA if name in differing]


def has_unranked_cells(families: Sequence[ChoiceFamily]) -> bool:
    """Whether the contests of these families contain a cell that is not ranked."""
    return any(_unranked_cells(contest) for family in families for contest in family.contests if contest.has_choice)


def family_title(choice_family: ChoiceFamily) -> str:
    """The title of the section about a family."""
    return f"{choice_family.workload}, {choice_family.about}" if choice_family.about else choice_family.workload


def choice_cautions(summary: Summary) -> list[str]:
    """The warnings that apply to all choices: that the runs were a rehearsal, and that no cell was repeated."""
    texts = [CAUTION] if summary.rehearsal else []
    words = {
        standing.word
        for choice_family in shown_families(summary)
        for contest in choice_family.contests
        for standing in contest.standings
    }
    return [*texts, ONCE] if "as measured" in words else texts


def uncompared_cells(summary: Summary) -> list[tuple[str, list[RunsLink]]]:
    """The cells that cannot be compared, because no other cell on the same number of ranks has the same batch size.

    Returns a list of (title of the family and number of ranks, cells). A cell is only listed if another cell ran on the same
    number of ranks with another batch size.
    """
    groups = []
    for choice_family in summary.choices:
        by_ranks: dict[tuple[int, int], list[Contest]] = {}
        for contest in choice_family.contests:
            by_ranks.setdefault((contest.ranks, contest.nodes), []).append(contest)
        for (rank_count, _), contests in by_ranks.items():
            lone_contenders = [(contest.batch, contest.contenders[0]) for contest in contests if len(contest.contenders) == 1]
            if len({contender.name for contest in contests for contender in contest.contenders}) > 1 and lone_contenders:
                links = [RunsLink(f"{contender.name} (batch {batch})", contender.cell) for batch, contender in lone_contenders]
                groups.append((f"{family_title(choice_family)}, {ranks_text(rank_count)}", links))
    return groups


def choice_rows(
    choice_family: ChoiceFamily, criterion_names: Sequence[str], tensors: Mapping[str, TensorMemory] = NO_TENSORS
) -> list[ChoiceRow]:
    """The rows of a family in the table of choices: at most MOST_SHOWN contests in which a reader has a choice.

    criterion_names: the criteria that the table shows. tensors: as for `best_cells_text`.
    """
    rows = [
        ChoiceRow(
            ranks_text(contest.ranks),
            _batch_and_nodes_text(contest),
            [best_cells_text(contest, name, tensors) for name in criterion_names],
            _unranked_cells(contest),
        )
        for contest in choice_family.contests
        if contest.has_choice
    ]
    return rows[:MOST_SHOWN]


def decision_tree(choice_family: ChoiceFamily) -> list[TreeNode]:
    """The questions of the decision tree of a family, in the order in which a reader should answer them."""
    has_several_fits = len(choice_family.one_rank) > 1
    one_rank = [
        (
            _batches_text(choice_family, fit.contests) if has_several_fits else "",
            _one_rank_text(fit),
            _cell_links(choice_family, fit.contests, _all_names(fit)),
        )
        for fit in choice_family.one_rank
    ]
    more_ranks = [
        (
            _contests_text(choice_family, fit.contests),
            ChoiceText([], value=_join_names(fit.fits), remark=_other_cells_text(fit), sure=bool(fit.fits)),
            _cell_links(choice_family, fit.contests, _all_names(fit)),
        )
        for fit in choice_family.more_ranks
    ]
    nodes = [TreeNode("Does it fit on one rank?", one_rank or [("", ChoiceText([], remark="not measured on one rank"), [])])]
    nodes.append(
        TreeNode(
            "What fits on more ranks?", more_ranks or [("", ChoiceText([], remark="not measured on more than one rank"), [])]
        )
    )
    kinds = {standing.kind for contest in choice_family.contests for standing in contest.standings}
    for question in choice_family.questions:
        answers = [
            (_contests_text(choice_family, answer.contests), *_answer_text(choice_family, answer, question.criterion))
            for answer in question.answers
        ]
        is_process = question.criterion == "peak_memory_bytes" and MEMORY_KINDS["rss_bytes"] in kinds
        nodes.append(TreeNode(PROCESS_QUESTION if is_process else QUESTIONS[question.criterion], answers))
    return nodes


def best_cells_text(contest: Contest, criterion: str, tensors: Mapping[str, TensorMemory] = NO_TENSORS) -> ChoiceText:
    """The best cells of a contest by one criterion, as text.

    tensors: {id of a cell: memory of its tensors}, judged in place of resident sets if known of all cells in the same way.
    """
    standing = next((candidate for candidate in contest.standings if candidate.criterion == criterion), None)
    if standing is None:
        measured_names = contest.contender_names("measured")
        return ChoiceText([], remark=f"only {measured_names[0]} was measured" if len(measured_names) == 1 else "")
    known_tensors = {entry.cell: tensors[entry.cell] for entry in standing.placed if entry.cell in tensors}
    is_known = len(known_tensors) == len(standing.placed) and len({memory.kind for memory in known_tensors.values()}) == 1
    if standing.kind == MEMORY_KINDS["rss_bytes"] and is_known:
        return _least_tensors_text(contest, known_tensors)
    names = {contender.cell: contender.name for contender in contest.contenders}
    best = sorted((RunsLink(names[cell], cell) for cell in standing.best), key=lambda link: natural_sort_key(link.text))
    links = best if len(best) <= MOST_NAMED else [RunsLink(_join_names([link.text for link in best]), best[0].cell)]
    if standing.word == "same work":
        return ChoiceText([], remark="equal: the same work")
    if standing.word == "not told apart":
        values = [ranked_cell.value for ranked_cell in standing.placed if ranked_cell.cell in standing.best]
        return ChoiceText(links, _format_range(min(values), max(values), standing.unit), "cannot be distinguished")
    certainty = {"as measured": AS_MEASURED, "equal": "equal", "best": ""}[standing.word]
    value = _format_quantity(standing.placed[0].value, standing.unit)
    return ChoiceText(links, value, certainty, _margin_text(standing, names), sure=standing.word != "as measured")


def _least_tensors_text(contest: Contest, tensors: Mapping[str, TensorMemory]) -> ChoiceText:
    """The cells of a contest whose tensors need the least memory, as text. tensors: {id of a cell: memory, all of one kind}."""
    names = {contender.cell: contender.name for contender in contest.contenders}
    ranked = sorted(tensors, key=lambda cell: (tensors[cell].size_bytes, natural_sort_key(names[cell])))
    least_bytes, kind = tensors[ranked[0]]
    best = [cell for cell in ranked if tensors[cell].size_bytes <= (1 + EQUAL_TOLERANCE) * least_bytes]
    links = [RunsLink(names[cell], cell) for cell in best]
    runner_up = next(iter(ranked[len(best) :]), ranked[0])
    percent = 100 * (1 - least_bytes / tensors[runner_up].size_bytes) if least_bytes else 0.0
    margin = f"{_format_percent(percent)}\u00a0% less than {names[runner_up]}" if percent else ""
    return ChoiceText(links, _format_quantity(least_bytes, "bytes"), kind, margin)


def _margin_text(standing: Standing, names: dict[str, str]) -> str:
    """How far the best cell is ahead of the first cell that is not among the best, such as `13 % faster than ddp`."""
    runner_up = next((placed_cell for placed_cell in standing.placed if placed_cell.cell not in standing.best), None)
    if runner_up is None or standing.margin_pct is None:
        return ""
    comparative = {"throughput_per_s": "faster", "final_accuracy_pct": "more"}.get(standing.criterion, "less")
    return f"{_format_percent(standing.margin_pct)}\u00a0% {comparative} than {names[runner_up.cell]}"


def _format_percent(value: float) -> str:
    """A margin in percent as text: one or two digits if it is below 10, else a whole number.

    More digits would be wrong, because the means from which the margin is computed are not more precise.
    """
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.1g}"


def _format_quantity(value: float, unit: str) -> str:
    """A number with its unit, as text. Bytes are given in units such as GiB, as in the tables of the report."""
    if unit != "bytes":
        return verdict_text.format_quantity(value, unit)
    name, size = notation.choose_unit([value])
    return f"{notation.format_number(value / size, 3)} {name}"


def _format_range(low: float, high: float, unit: str) -> str:
    """A range of values as text, such as `57.9 to 58.5 s`."""
    first, last = _format_quantity(low, unit), _format_quantity(high, unit)
    same_unit = first.partition(" ")[2] == last.partition(" ")[2]
    return last if first == last else f"{first.partition(' ')[0] if same_unit else first} to {last}"


def _unranked_cells(contest: Contest) -> list[tuple[str, list[RunsLink]]]:
    """The cells of a contest that are not ranked, as (reason, cells).

    For a strategy that does other work by design, the reason contains the sentence of the strategy about this work.
    """
    reason_by_outcome = {
        "does not fit": "out of memory",
        "over the limit": "over the time limit",
        "other work": "other work by design",
        "gpu trouble": "its GPUs were shared, throttled or faulty",
        "looked into": "also measured with fewer instruments",
        "not ranked": "not proven to do the same work",
        "failed": "failed",
        "not measured": "not measured",
    }
    links_by_reason: dict[str, list[RunsLink]] = {}
    for outcome, reason in reason_by_outcome.items():
        for contender in (contender for contender in contest.contenders if contender.outcome == outcome):
            full_reason = f"{reason} ({contender.why})" if outcome == "other work" else reason
            links_by_reason.setdefault(full_reason, []).append(RunsLink(contender.name, contender.cell))
    return list(links_by_reason.items()) + [
        (contender.partly, [RunsLink(contender.name, contender.cell)]) for contender in contest.contenders if contender.partly
    ]


def _one_rank_text(fit: MemoryFit) -> ChoiceText:
    if fit.fits and not fit.does_not_fit:
        return ChoiceText([], value="yes", remark=_other_cells_text(fit), sure=True)
    if fit.fits:
        return ChoiceText([], value=f"yes with {_join_names(fit.fits)}", remark=_other_cells_text(fit), sure=True)
    other_cells = _other_cells_text(fit)
    return ChoiceText([], value="no", remark=other_cells, sure=True) if fit.does_not_fit else ChoiceText([], remark=other_cells)


def _other_cells_text(fit: MemoryFit) -> str:
    outcomes = (
        (fit.does_not_fit, "out of memory"),
        (fit.over_the_limit, "over the time limit"),
        (fit.unknown, "not measured, or failed"),
    )
    return "; ".join(f"{_join_names(names)}: {outcome}" for names, outcome in outcomes if names)


def _all_names(fit: MemoryFit) -> list[str]:
    return [*fit.fits, *fit.does_not_fit, *fit.over_the_limit, *fit.unknown]


def _answer_text(choice_family: ChoiceFamily, answer: CriterionAnswer, criterion: str) -> tuple[ChoiceText, list[RunsLink]]:
    """Returns (the answer to one question of the section "Which strategy to choose?" as text, the cells from which it follows).

    The cells are the best cells of each contest, that is, of each set of cells that may be compared."""
    certainty = {
        "best": "",
        "equal": "equal",
        "not told apart": "cannot be distinguished",
        "same work": "equal: proven to do the same work, so accuracy is no reason to choose",
        "as measured": AS_MEASURED,
        "only one fits": "the only one that fits",
        "only one": "nothing to compare",
        "none fits": "none of the cells that ran fits",
        "not measured": "not measured",
    }[answer.word]
    if answer.word == "same work":
        return ChoiceText([], remark=certainty), []
    links = []
    for contest_index in answer.contests:
        contest = choice_family.contests[contest_index]
        standing = next((entry for entry in contest.standings if entry.criterion == criterion), None)
        values = {entry.cell: _format_quantity(entry.value, standing.unit) for entry in standing.placed} if standing else {}
        for entry in contest.contenders:
            if entry.name in answer.best and (standing is None or entry.cell in standing.best):
                label_parts = [_cell_label(choice_family, contest, entry.name), values.get(entry.cell, "")]
                links.append(RunsLink(": ".join(filter(None, label_parts)), entry.cell))
    best_names = "" if answer.word == "only one" else _join_names(answer.best)
    return ChoiceText([], best_names, certainty, sure=answer.word in ("best", "equal", "only one fits")), links


def _cell_links(choice_family: ChoiceFamily, contest_indexes: Sequence[int], names: Sequence[str]) -> list[RunsLink]:
    """Links to cells in some contests, such as `ddp ×8`. contest_indexes: their indexes. names: the names of the cells."""
    links = []
    for contest_index in contest_indexes:
        contest = choice_family.contests[contest_index]
        contenders = [contender for contender in contest.contenders if contender.name in names]
        links += [RunsLink(_cell_label(choice_family, contest, contender.name), contender.cell) for contender in contenders]
    return links


def _cell_label(choice_family: ChoiceFamily, contest: Contest, name: str) -> str:
    """A cell of a contest, such as `ddp ×8`, with the batch if the family has contests of as many ranks with other batches."""
    batches = {other.batch for other in choice_family.contests if (other.ranks, other.nodes) == (contest.ranks, contest.nodes)}
    return f"{name} ×{_ranks_and_nodes(choice_family, contest)}{f', batch {contest.batch}' if len(batches) > 1 else ''}"


def _ranks_and_nodes(choice_family: ChoiceFamily, contest: Contest) -> str:
    """The number of ranks of a contest, such as `8`.

    If the family has contests with the same number of ranks on other numbers of nodes, the nodes are added: `8 on 2 nodes`.
    """
    return f"{contest.ranks}{_nodes_suffix(choice_family, contest.ranks, contest.nodes)}"


def _nodes_suffix(choice_family: ChoiceFamily, rank_count: int, nodes: int) -> str:
    other_nodes = len({contest.nodes for contest in choice_family.contests if contest.ranks == rank_count}) > 1
    return f" on {nodes} node{'s' if nodes > 1 else ''}" if other_nodes else ""


def _join_names(names: Sequence[str]) -> str:
    """The names of cells as one text, such as `ddp, fsdp2 and zero3`.

    Two cells of the same strategy are written as `pp_1f1b (4 and 8 micro-batches)`. If a name contains a comma, semicolons
    separate the names.
    """
    by_strategy: dict[str, list[str]] = {}
    for name in names:
        strategy, _, variant = name.partition(", ")
        by_strategy.setdefault(strategy, []).extend([variant] if variant else [])
    texts = [f"{strategy} ({_join_variants(variants)})" if variants else strategy for strategy, variants in by_strategy.items()]
    separator = "; " if any("," in name for name in texts) else ", "
    return " and ".join(filter(None, [separator.join(texts[:-1]), *texts[-1:]]))


def _join_variants(variants: Sequence[str]) -> str:
    """Variants of one strategy as text, such as `4 and 8 micro-batches`. Words with which all variants end are written once."""
    heads, tails = zip(*(variant.partition(" ")[::2] for variant in variants), strict=True)
    return f"{_join_names(heads)} {tails[0]}".rstrip() if len(set(tails)) == 1 else "; ".join(variants)


def _batches_text(choice_family: ChoiceFamily, contest_indexes: Sequence[int]) -> str:
    return f"batch {_join_names([str(choice_family.contests[contest_index].batch) for contest_index in contest_indexes])}"


def _contests_text(choice_family: ChoiceFamily, contest_indexes: Sequence[int]) -> str:
    """The contests in which an answer holds, as text, such as `2 and 4 ranks; 8 ranks at batch 64`.

    contest_indexes: the indexes of these contests in the family. The batch size is only named if the family has a contest on
    the same ranks with another batch size in which the answer does not hold."""
    by_ranks: dict[tuple[int, int], list[int]] = {}
    for contest_index in contest_indexes:
        contest = choice_family.contests[contest_index]
        by_ranks.setdefault((contest.ranks, contest.nodes), []).append(contest.batch)
    parts: list[tuple[list[int], str]] = []  # (numbers of ranks, text about nodes and batch size behind these numbers)
    for (ranks, nodes), batches in by_ranks.items():
        all_batches = [entry.batch for entry in choice_family.contests if (entry.ranks, entry.nodes) == (ranks, nodes)]
        nodes_text = _nodes_suffix(choice_family, ranks, nodes)
        batch_text = f" at batch {_join_names([str(batch) for batch in batches])}" if batches != all_batches else ""
        if parts and not nodes_text + batch_text + parts[-1][1]:
            parts[-1][0].append(ranks)
        else:
            parts.append(([ranks], nodes_text + batch_text))
    return "; ".join(
        f"{_join_names([str(entry) for entry in ranks])} rank{'s' if ranks != [1] else ''}{suffix}" for ranks, suffix in parts
    )


def ranks_text(rank_count: int) -> str:
    """The number of ranks in words, such as `8 ranks`."""
    return "1 rank" if rank_count == 1 else f"{rank_count} ranks"


def contest_text(contest: Contest) -> str:
    """The ranks and the batch size of a contest as text, such as `8 ranks, batch 64`."""
    return f"{ranks_text(contest.ranks)}, {_batch_and_nodes_text(contest)}"


def _batch_and_nodes_text(contest: Contest) -> str:
    """The batch size of a contest, and its number of nodes if there are several."""
    nodes = f"{contest.nodes} nodes, " if contest.nodes > 1 else ""
    return f"{nodes}batch {contest.batch}"
