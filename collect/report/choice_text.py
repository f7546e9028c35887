"""Writes the answers to "which strategy should I choose?" as text, which the terminal and the page of a report both use.

A family is a set of cells of one workload. A contest has those that ran on equal numbers of ranks and nodes with equal batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from collect.choices.contest import Contest, make_natural_sort_key
from collect.choices.family import ChoiceFamily, CriterionAnswer, MemoryFit
from collect.choices.standing import CRITERIA, EQUAL_TOLERANCE, Standing
from collect.figures.memory_parts import TensorMemory
from collect.metrics.memory import KIND_BY_MEMORY_COLUMN
from collect.report import verdict_text
from collect.summary import Summary
from shardlab.terminal import notation
from shardlab.terminal.table import Column, Table, TextPiece

REHEARSAL_CAUTION = "choices of a rehearsal show that a choice can be computed, not which strategy to choose"
AS_MEASURED_REMARK = "as measured"
NOT_REPEATED_CAUTION = (
    "as measured: n = 1 and no cell was repeated, so the scatter is not known; another measurement may have another order"
)
HEADING_BY_CRITERION = {
    "throughput_per_s": "Fastest",
    "peak_memory_bytes": "Least memory per rank",
    "sent_counted_bytes": "Fewest bytes per step",
    "final_accuracy_pct": "Most accurate",
    "energy_per_unit_j": "Least energy",
}
QUESTION_BY_CRITERION = {
    "throughput_per_s": "Which is the fastest?",
    "peak_memory_bytes": "Which needs the least memory per rank?",
    "sent_counted_bytes": "Which sends the fewest bytes per step?",
    "final_accuracy_pct": "Which is the most accurate?",
    "energy_per_unit_j": "Which needs the least energy per unit?",
}
FamilyContest = tuple[ChoiceFamily, Contest]  # a family, and a contest of its cells
NO_TENSORS: Mapping[str, TensorMemory] = {}
PROCESS_QUESTION = "Which has the smallest process on a rank, with the interpreter and its libraries?"
MOST_SHOWN = 24  # the most families that a report shows, and the most contests that it shows of each family
MOST_CITED_CELLS = 100  # the most cells that are listed under one answer
MOST_NAMED_CELLS = 3  # if a contest has more best cells than this number, the table has one link for all of them together


class ChoiceText(msgspec.Struct, frozen=True):
    """The text of a choice by one criterion."""

    names: list[TextPiece]
    """The best cells, each with a link to its runs."""
    value: str = ""
    """The value of the first of the best cells, with its unit."""
    remark: str = ""
    """How certain the choice is, such as "cannot be distinguished"."""
    margin: str = ""
    """How far the best cell is ahead of the first cell that is not among the best, such as "13 % faster than ddp"."""
    reason: str = ""
    """Why the best cell is the best, by the traces of the cells."""
    is_sure: bool = False
    """Whether one cell is significantly better than all others, or the best cells are known to be equal."""

    def __str__(self) -> str:
        text = " ".join(filter(None, [", ".join(link.text for link in self.names), self.value]))
        return f"{text} ({self.remark})" if text and self.remark else text or self.remark

    @property
    def pieces(self) -> list[TextPiece]:
        """The text as a page shows it: the best cells and their value, then how certain the choice is, and why."""
        names = [msgspec.structs.replace(name, style="sure" if self.is_sure else "") for name in self.names]
        certainty = "; ".join(filter(None, (self.remark, self.margin)))
        reason_clause = f"why: {self.reason}" if self.reason else ""
        return [
            *join_links(names),
            TextPiece(self.value, style="value"),
            *(TextPiece(text, style="more") for text in (certainty, reason_clause)),
        ]


class TreeNode(msgspec.Struct, frozen=True):
    """A question of the decision tree, with its answers."""

    question: str
    """The question."""
    answers: list[tuple[str, ChoiceText, list[TextPiece]]]
    """For each answer (the contests for which the answer holds, as text; the answer; the cells from which it follows)."""


def select_shown_families(summary: Summary) -> list[ChoiceFamily]:
    """The families that a report shows: at most MOST_SHOWN families in which a reader has a choice."""
    return [choice_family for choice_family in summary.choices if choice_family.has_choice][:MOST_SHOWN]


def write_hidden_note(summary: Summary) -> str:
    """A sentence that says how many contests the report leaves out; "" if it shows all contests."""
    contest_counts = [sum(contest.has_choice for contest in family.contests) for family in summary.choices if family.has_choice]
    hidden_count = sum(contest_counts) - sum(min(count, MOST_SHOWN) for count in contest_counts[:MOST_SHOWN])
    return f"{hidden_count:,} more comparisons are in summary.json" if hidden_count else ""


def find_differing_criteria(families: Sequence[ChoiceFamily]) -> list[str]:
    """The criteria by which cells differ in at least one contest of these families, in the order of CRITERIA."""
    differing_names = {standing.criterion for standing in _list_standings(families) if standing.word != "same work"}
    return [name for name in CRITERIA if name in differing_names]


def _list_standings(families: Sequence[ChoiceFamily]) -> list[Standing]:
    return [standing for family in families for contest in family.contests for standing in contest.standings]


def make_family_title(choice_family: ChoiceFamily) -> str:
    """The title of the section about a family."""
    return f"{choice_family.workload}, {choice_family.about}" if choice_family.about else choice_family.workload


def list_choice_cautions(summary: Summary) -> list[str]:
    """The warnings that apply to all choices: that the runs were a rehearsal, and that no cell was repeated."""
    cautions = [REHEARSAL_CAUTION] if summary.rehearsal else []
    is_as_measured = any(standing.word == "as measured" for standing in _list_standings(select_shown_families(summary)))
    return [*cautions, NOT_REPEATED_CAUTION] if is_as_measured else cautions


def list_uncompared_cells(summary: Summary) -> list[tuple[str, list[TextPiece]]]:
    """The cells that cannot be compared, because no other cell on the same number of ranks has the same batch size.

    Returns a list of (title of the family and number of ranks, cells). A cell is only listed if another cell ran on the same
    number of ranks with another batch size.
    """
    uncompared_groups = []
    for choice_family in summary.choices:
        contests_by_ranks: dict[tuple[int, int], list[Contest]] = {}
        for contest in choice_family.contests:
            contests_by_ranks.setdefault((contest.ranks, contest.nodes), []).append(contest)
        for (rank_count, _), contests in contests_by_ranks.items():
            lone_contenders = [(contest.batch, contest.contenders[0]) for contest in contests if len(contest.contenders) == 1]
            if len({contender.name for contest in contests for contender in contest.contenders}) > 1 and lone_contenders:
                links = [TextPiece(f"{contender.name} (batch {batch})", contender.cell) for batch, contender in lone_contenders]
                uncompared_groups.append((f"{make_family_title(choice_family)}, {name_ranks(rank_count)}", links))
    return uncompared_groups


def make_choice_table(
    families: Sequence[ChoiceFamily], criterion_names: Sequence[str], tensors: Mapping[str, TensorMemory] = NO_TENSORS
) -> Table[FamilyContest]:
    """The table of choices: a row for each contest in which a reader has a choice, at most MOST_SHOWN of a family.

    criterion_names: the criteria that the table shows. tensors: as for `describe_best_cells`.
    """

    def make_criterion_column(criterion: str) -> Column[FamilyContest]:
        def find_best(row: FamilyContest) -> ChoiceText:
            return describe_best_cells(row[1], criterion, tensors)

        return Column(
            HEADING_BY_CRITERION[criterion], lambda row: str(find_best(row)), pieces=lambda row: find_best(row).pieces
        )

    contest_rows = [
        (family, contest)
        for family in families
        for contest in [contest for contest in family.contests if contest.has_choice][:MOST_SHOWN]
    ]
    columns: list[Column[FamilyContest]] = [
        Column(
            "Ranks", lambda row: name_contest(row[1]),
            pieces=lambda row: [TextPiece(name_ranks(row[1].ranks)), TextPiece(_name_batch_and_nodes(row[1]), style="more")],
        ),
        *map(make_criterion_column, criterion_names),
    ]  # fmt: skip
    if any(_list_unranked_cells(contest) for _, contest in contest_rows):
        columns.append(Column("Not ranked", pieces=lambda row: _list_unranked_cells(row[1])))
    title = "Which strategy to choose"
    return Table(title, columns, contest_rows, "choices", group=lambda row: make_family_title(row[0]), has_group_headings=True)


def join_links(links: Sequence[TextPiece]) -> list[TextPiece]:
    """Links with commas between them."""
    return [piece for link in links for piece in (TextPiece(", "), link)][1:]


def make_decision_tree(choice_family: ChoiceFamily) -> list[TreeNode]:
    """The questions of the decision tree of a family, in the order in which a reader should answer them."""

    def answer_fits(
        fits: Sequence[MemoryFit],
        name_contests: Callable[[Sequence[int]], str],
        describe_fit: Callable[[MemoryFit], ChoiceText],
    ) -> list[tuple[str, ChoiceText, list[TextPiece]]]:
        return [(name_contests(fit.contests), describe_fit(fit), _make_cell_links(choice_family, fit)) for fit in fits]

    def name_batches(contest_indexes: Sequence[int]) -> str:
        batches = [str(choice_family.contests[index].batch) for index in contest_indexes]
        return f"batch {join_names(batches)}" if len(choice_family.one_rank) > 1 else ""

    one_rank_answers = answer_fits(choice_family.one_rank, name_batches, _describe_fit_on_one_rank)
    more_ranks = answer_fits(choice_family.more_ranks, partial(_name_contests, choice_family), _describe_fit_on_more_ranks)
    tree_nodes = [
        TreeNode("Does it fit on one rank?", one_rank_answers or [("", ChoiceText([], remark="not measured on one rank"), [])]),
        TreeNode(
            "What fits on more ranks?", more_ranks or [("", ChoiceText([], remark="not measured on more than one rank"), [])]
        ),
    ]
    memory_kinds = {standing.kind for standing in _list_standings([choice_family])}
    for choice in choice_family.questions:
        answers = [
            (_name_contests(choice_family, answer.contests), *_describe_answer(choice_family, answer, choice.criterion))
            for answer in choice.answers
        ]
        is_process = choice.criterion == "peak_memory_bytes" and KIND_BY_MEMORY_COLUMN["rss_bytes"] in memory_kinds
        tree_nodes.append(TreeNode(PROCESS_QUESTION if is_process else QUESTION_BY_CRITERION[choice.criterion], answers))
    return tree_nodes


def describe_best_cells(contest: Contest, criterion: str, tensors: Mapping[str, TensorMemory] = NO_TENSORS) -> ChoiceText:
    """The best cells of a contest by one criterion, as text.

    tensors: {id of a cell: memory of its tensors}, judged in place of resident sets if known of all cells in the same way.
    """
    standing = next((candidate for candidate in contest.standings if candidate.criterion == criterion), None)
    if standing is None:
        measured_names = contest.contender_names("measured")
        return ChoiceText([], remark=f"only {measured_names[0]} was measured" if len(measured_names) == 1 else "")
    known_tensors = {entry.cell: tensors[entry.cell] for entry in standing.placed if entry.cell in tensors}
    is_known = len(known_tensors) == len(standing.placed) and len({memory.kind for memory in known_tensors.values()}) == 1
    if standing.kind == KIND_BY_MEMORY_COLUMN["rss_bytes"] and is_known:
        return _describe_least_tensors(contest, known_tensors)
    names = {contender.cell: contender.name for contender in contest.contenders}
    best = sorted((TextPiece(names[cell], cell) for cell in standing.best), key=lambda link: make_natural_sort_key(link.text))
    links = best if len(best) <= MOST_NAMED_CELLS else [TextPiece(join_names([link.text for link in best]), best[0].link)]
    if standing.word == "same work":
        return ChoiceText([], remark="equal: the same work")
    if standing.word == "not told apart":
        values = [ranked_cell.value for ranked_cell in standing.placed if ranked_cell.cell in standing.best]
        return ChoiceText(links, _format_range(min(values), max(values), standing.unit), "cannot be distinguished")
    certainty = {"as measured": AS_MEASURED_REMARK, "equal": "equal", "best": ""}[standing.word]
    value_text = _format_quantity(standing.placed[0].value, standing.unit)
    return ChoiceText(links, value_text, certainty, _describe_margin(standing, names), is_sure=standing.word != "as measured")


def _describe_least_tensors(contest: Contest, tensors: Mapping[str, TensorMemory]) -> ChoiceText:
    """The cells of a contest whose tensors need the least memory, as text. tensors: {id of a cell: memory, all of one kind}."""
    name_by_cell = {contender.cell: contender.name for contender in contest.contenders}
    ranked_cells = sorted(tensors, key=lambda cell: (tensors[cell].size_bytes, make_natural_sort_key(name_by_cell[cell])))
    least_bytes, memory_kind = tensors[ranked_cells[0]]
    best_cells = [cell for cell in ranked_cells if tensors[cell].size_bytes <= (1 + EQUAL_TOLERANCE) * least_bytes]
    links = [TextPiece(name_by_cell[cell], cell) for cell in best_cells]
    runner_up = next(iter(ranked_cells[len(best_cells) :]), ranked_cells[0])
    margin_pct = 100 * (1 - least_bytes / tensors[runner_up].size_bytes) if least_bytes else 0.0
    margin = f"{_format_percent(margin_pct)}\u00a0% less than {name_by_cell[runner_up]}" if margin_pct else ""
    return ChoiceText(links, _format_quantity(least_bytes, "bytes"), memory_kind, margin)


def _describe_margin(standing: Standing, name_by_cell: dict[str, str]) -> str:
    """How far the best cell is ahead of the first cell that is not among the best, such as `13 % faster than ddp`."""
    runner_up = next((placed_cell for placed_cell in standing.placed if placed_cell.cell not in standing.best), None)
    if runner_up is None or standing.margin_pct is None:
        return ""
    comparative = {"throughput_per_s": "faster", "final_accuracy_pct": "more"}.get(standing.criterion, "less")
    return f"{_format_percent(standing.margin_pct)}\u00a0% {comparative} than {name_by_cell[runner_up.cell]}"


def _format_percent(percent: float) -> str:
    """A margin in percent as text: one or two digits if it is below 10, else a whole number.

    More digits would be wrong, because the means from which the margin is computed are not more precise.
    """
    return f"{percent:,.0f}" if percent >= 9.95 else f"{percent:.1f}" if percent >= 1 else f"{percent:.1g}"


def _format_quantity(value: float, unit: str) -> str:
    """A number with its unit, as text. Bytes are given in units such as GiB, as in the tables of the report."""
    if unit != "bytes":
        return verdict_text.format_quantity(value, unit)
    unit_name, unit_bytes = notation.choose_unit([value])
    return f"{notation.format_number(value / unit_bytes, 3)} {unit_name}"


def _format_range(low: float, high: float, unit: str) -> str:
    """A range of values as text, such as `57.9 to 58.5 s`."""
    low_text, high_text = _format_quantity(low, unit), _format_quantity(high, unit)
    return high_text if low_text == high_text else verdict_text.join_range(low_text, high_text)


def _list_unranked_cells(contest: Contest) -> list[TextPiece]:
    """The cells of a contest that are not ranked: for each reason links to the cells, then the reason.

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
    links_by_reason: dict[str, list[TextPiece]] = {}
    for outcome, reason in reason_by_outcome.items():
        for contender in (contender for contender in contest.contenders if contender.outcome == outcome):
            outcome_reason = f"{reason} ({contender.why})" if outcome == "other work" else reason
            links_by_reason.setdefault(outcome_reason, []).append(TextPiece(contender.name, contender.cell))
    reasons_and_links = [*links_by_reason.items()]
    reasons_and_links += [
        (contender.partly, [TextPiece(contender.name, contender.cell)]) for contender in contest.contenders if contender.partly
    ]
    return [piece for reason, links in reasons_and_links for piece in (*join_links(links), TextPiece(reason, style="more"))]


def _describe_fit_on_one_rank(fit: MemoryFit) -> ChoiceText:
    if fit.fits and not fit.does_not_fit:
        return ChoiceText([], value="yes", remark=_describe_cells_without_fit(fit), is_sure=True)
    if fit.fits:
        return ChoiceText([], value=f"yes with {join_names(fit.fits)}", remark=_describe_cells_without_fit(fit), is_sure=True)
    other_cells = _describe_cells_without_fit(fit)
    return (
        ChoiceText([], value="no", remark=other_cells, is_sure=True) if fit.does_not_fit else ChoiceText([], remark=other_cells)
    )


def _describe_fit_on_more_ranks(fit: MemoryFit) -> ChoiceText:
    return ChoiceText([], value=join_names(fit.fits), remark=_describe_cells_without_fit(fit), is_sure=bool(fit.fits))


def _describe_cells_without_fit(fit: MemoryFit) -> str:
    outcomes = (
        (fit.does_not_fit, "out of memory"),
        (fit.over_the_limit, "over the time limit"),
        (fit.unknown, "not measured, or failed"),
    )
    return "; ".join(f"{join_names(names)}: {outcome}" for names, outcome in outcomes if names)


def _describe_answer(
    choice_family: ChoiceFamily, answer: CriterionAnswer, criterion: str
) -> tuple[ChoiceText, list[TextPiece]]:
    """Returns (the answer to one question of the section "Which strategy to choose?" as text, the cells from which it follows).

    The cells are the best cells of each contest, that is, of each set of cells that may be compared."""
    certainty = {
        "best": "",
        "equal": "equal",
        "not told apart": "cannot be distinguished",
        "same work": "equal: proven to do the same work, so accuracy is no reason to choose",
        "as measured": AS_MEASURED_REMARK,
        "only one fits": "the only one that fits",
        "only one": "nothing to compare",
        "none fits": "none of the cells that ran fits",
        "not measured": "not measured",
    }[answer.word]
    if answer.word == "same work":
        return ChoiceText([], remark=certainty), []
    cell_links = []
    for contest_index in answer.contests:
        contest = choice_family.contests[contest_index]
        standing = next((entry for entry in contest.standings if entry.criterion == criterion), None)
        values = {entry.cell: _format_quantity(entry.value, standing.unit) for entry in standing.placed} if standing else {}
        for entry in contest.contenders:
            if entry.name in answer.best and (standing is None or entry.cell in standing.best):
                label_parts = [_make_cell_label(choice_family, contest, entry.name), values.get(entry.cell, "")]
                cell_links.append(TextPiece(": ".join(filter(None, label_parts)), entry.cell))
    best_names = "" if answer.word == "only one" else join_names(answer.best)
    return ChoiceText([], best_names, certainty, is_sure=answer.word in ("best", "equal", "only one fits")), cell_links


def _make_cell_links(choice_family: ChoiceFamily, fit: MemoryFit) -> list[TextPiece]:
    """Links to the cells of some contests, such as `ddp ×8`."""
    fit_names = [*fit.fits, *fit.does_not_fit, *fit.over_the_limit, *fit.unknown]
    links = []
    for contest_index in fit.contests:
        contest = choice_family.contests[contest_index]
        contenders = [contender for contender in contest.contenders if contender.name in fit_names]
        links += [
            TextPiece(_make_cell_label(choice_family, contest, contender.name), contender.cell) for contender in contenders
        ]
    return links


def _make_cell_label(choice_family: ChoiceFamily, contest: Contest, name: str) -> str:
    """A cell of a contest, such as `ddp ×8`, with the batch if the family has contests of as many ranks with other batches."""
    batches = {other.batch for other in choice_family.contests if (other.ranks, other.nodes) == (contest.ranks, contest.nodes)}
    nodes_suffix = _make_nodes_suffix(choice_family, contest.ranks, contest.nodes)
    return f"{name} ×{contest.ranks}{nodes_suffix}{f', batch {contest.batch}' if len(batches) > 1 else ''}"


def _make_nodes_suffix(choice_family: ChoiceFamily, rank_count: int, nodes: int) -> str:
    """The number of nodes, such as ` on 2 nodes`, if the family has contests with as many ranks on other numbers of nodes."""
    other_nodes = len({contest.nodes for contest in choice_family.contests if contest.ranks == rank_count}) > 1
    return f" on {nodes} node{'s' if nodes > 1 else ''}" if other_nodes else ""


def join_names(names: Sequence[str]) -> str:
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
    first_words, other_words = zip(*(variant.partition(" ")[::2] for variant in variants), strict=True)
    return f"{join_names(first_words)} {other_words[0]}".rstrip() if len(set(other_words)) == 1 else "; ".join(variants)


def _name_contests(choice_family: ChoiceFamily, contest_indexes: Sequence[int]) -> str:
    """The contests in which an answer holds, as text, such as `2 and 4 ranks; 8 ranks at batch 64`.

    contest_indexes: the indexes of these contests in the family. The batch size is only named if the family has a contest on
    the same ranks with another batch size in which the answer does not hold."""
    batches_by_ranks: dict[tuple[int, int], list[int]] = {}
    for contest_index in contest_indexes:
        contest = choice_family.contests[contest_index]
        batches_by_ranks.setdefault((contest.ranks, contest.nodes), []).append(contest.batch)
    parts: list[tuple[list[int], str]] = []  # (numbers of ranks, text about nodes and batch size behind these numbers)
    for (ranks, nodes), batches in batches_by_ranks.items():
        all_batches = [entry.batch for entry in choice_family.contests if (entry.ranks, entry.nodes) == (ranks, nodes)]
        nodes_text = _make_nodes_suffix(choice_family, ranks, nodes)
        batch_text = f" at batch {join_names([str(batch) for batch in batches])}" if batches != all_batches else ""
        if parts and not nodes_text + batch_text + parts[-1][1]:
            parts[-1][0].append(ranks)
        else:
            parts.append(([ranks], nodes_text + batch_text))
    return "; ".join(
        f"{join_names([str(entry) for entry in ranks])} rank{'s' if ranks != [1] else ''}{suffix}" for ranks, suffix in parts
    )


def name_ranks(rank_count: int) -> str:
    """The number of ranks in words, such as `8 ranks`."""
    return "1 rank" if rank_count == 1 else f"{rank_count} ranks"


def name_contest(contest: Contest) -> str:
    """The ranks and the batch size of a contest as text, such as `8 ranks, batch 64`."""
    return f"{name_ranks(contest.ranks)}, {_name_batch_and_nodes(contest)}"


def _name_batch_and_nodes(contest: Contest) -> str:
    """The batch size of a contest, and its number of nodes if there are several."""
    nodes = f"{contest.nodes} nodes, " if contest.nodes > 1 else ""
    return f"{nodes}batch {contest.batch}"
