"""Writes the result of `jobs advise` for people: sentences and a table, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from jobs.planner import device_profile
from jobs.planner.advise import DOES_NOT_FIT, NAMED_SHARE, Advice, AdviceReport, Question
from jobs.planner.planner_table import format_duration, format_memory, format_size
from jobs.planner.rules import JudgedRule
from shardlab.terminal import plain_table
from shardlab.terminal.console import Output
from shardlab.terminal.notation import format_amount
from shardlab.terminal.table import Column, Table

MOST_COLUMNS = 100  # of a line
TABLE_TITLE = "groups of ties, up to 5 % apart (batch: micro-batch x passes, ckpt: activation checkpointing)"


def print_advice(out: Output, question: Question, report: AdviceReport, *, is_default_batch: bool = False) -> None:
    """Print the recommendation with its reason, the question, the best degrees of each strategy by groups of ties, and what
    would change the advice. is_default_batch: whether the user named no global batch."""
    width = min(out.width or MOST_COLUMNS, MOST_COLUMNS)
    best_of_strategy = {advice.cell.strategy: advice for advice in reversed(report.ranked)}
    rows = [advice for advice in report.ranked if best_of_strategy[advice.cell.strategy] is advice]
    timed_advice = [advice for advice in rows if advice.group is not None]

    def print_wrapped(sentences: Iterator[str]) -> None:
        for sentence in sentences:
            for line in textwrap.wrap(sentence, width, subsequent_indent="  ", break_on_hyphens=False):
                out.print_line(line)

    print_wrapped(_recommend_strategy(question, timed_advice))
    print_wrapped(_describe_question(question, is_default_batch=is_default_batch))
    if timed_advice:
        out.show_table(plain_table.fit_table(_make_table(question, timed_advice), width))
    print_wrapped(_explain_missing(rows[len(timed_advice) :]))
    if timed_advice:
        print_wrapped(_describe_changes(question, report, timed_advice[0]))
        print_wrapped(_describe_rules(report.rules))


def _recommend_strategy(question: Question, timed_advice: Sequence[Advice]) -> Iterator[str]:
    """A sentence with the recommendation and its reason, and one with its numbers. timed_advice: the strategies with a
    throughput."""
    if not timed_advice:
        yield "No strategy can be recommended: of none it is known that it fits and how fast it is."
        return
    best, *others = timed_advice
    ties = sum(advice.group == 1 for advice in timed_advice)
    if not others:
        why = f"it is the only strategy with {question.precision} that fits and whose time is known"
    elif ties == 1:
        why = f"the next, {others[0].cell.strategy}, is {_format_gain(others[0], best)} ({', '.join(others[0].reasons)})"
    elif best.cell.strategy in ("single", "ddp"):
        why = "each GPU holds the whole model, and no strategy that shards it is more than 5 % faster"
    else:
        merit = "PyTorch develops it first" if best.cell.strategy.startswith("fsdp2") else "it is the simplest still developed"
        why = f"{ties} strategies are within 5 % of the fastest, which the planner cannot tell apart; of these, {merit}"
    yield f"Use {_format_configuration(best)}: {why}."
    rates, step_s = best.range_per_s, best.predicted.step_s
    assert rates is not None
    assert step_s is not None
    low, likely, high = (_format_rate(question, value) for value in (rates.low, rates.likely, rates.high))
    yield (
        f"Predicted: {likely} {question.workload.unit}/s ({low} to {high}); a step of {format_duration(step_s.likely)}: "
        f"{', '.join(best.reasons)}; {format_memory(best.predicted)} of memory (fits: {best.predicted.fits})."
    )


def _describe_question(question: Question, *, is_default_batch: bool) -> Iterator[str]:
    machine, tokens = question.machine, question.seq_len
    links = [link.name for link in (machine.inside, machine.between if question.nodes > 1 else None) if link is not None]
    batch = f"{question.global_batch:,} {question.workload.unit}"
    if tokens is not None:
        batch = f"{question.global_batch:,} sequences of {tokens:,} tokens ({tokens * question.global_batch:,} tokens)"
    gpu_name = machine.name if machine.gpu is None else device_profile.gpu_name(machine.gpu)
    capacity = "" if machine.capacity is None else f" ({format_size(machine.capacity.likely)})"
    yield (
        f"All strategies do the same work: {question.workload.name} ({question.facts.parameters:,} "
        f"parameters) in {question.precision} on {question.gpus} x {gpu_name}{capacity}, {question.nodes} node(s), "
        f"{' and '.join(links)}; {batch} a step{' (the default; --global-batch N)' if is_default_batch else ''}."
    )


def _make_table(question: Question, timed_advice: Sequence[Advice]) -> Table[Advice]:
    first_of_group = {advice.group or 0: advice for advice in reversed(timed_advice)}
    numbers = {id(first_of_group[group]): str(number) for number, group in enumerate(sorted(first_of_group), 1)}
    columns: list[Column[Advice]] = [
        Column("", lambda advice: numbers.get(id(advice), "")),
        Column("strategy", lambda advice: advice.cell.strategy),
        Column("mesh", _format_mesh),
        Column("batch", _format_batch, is_number=False, priority=1),
        Column("sync", lambda advice: "".join(_list_sync(advice)).removeprefix("sync="), priority=3),
        Column("memory", lambda advice: format_memory(advice.predicted)),
        Column(f"{question.workload.unit}/s", lambda advice: _format_rate(question, advice.items_per_s or 0.0)),
        Column("slower by", lambda advice: "" if advice is timed_advice[0] else "".join(advice.reasons[:1]), priority=2),
    ]
    return Table(TABLE_TITLE, columns, timed_advice)


def _explain_missing(untimed: Sequence[Advice]) -> Iterator[str]:
    """A sentence for each reason why strategies have no throughput."""
    names: dict[str, list[str]] = {}
    for advice in untimed:
        needed = f" ({format_memory(advice.predicted)})" if advice.predicted.memory_bytes is not None else ""
        names.setdefault(advice.reasons[0], []).append(f"{advice.cell.strategy}{needed}")
    for reason, strategies in names.items():
        yield f"{reason[0].upper()}{reason[1:]}: {', '.join(strategies)}."


def _describe_changes(question: Question, report: AdviceReport, best: Advice) -> Iterator[str]:
    """What would change the advice, with the predicted numbers. A change of the throughput by less than 2 % is left out."""
    for difference, advice in report.changes.items():
        outcome = DOES_NOT_FIT
        if advice.items_per_s is not None and best.items_per_s is not None:
            if abs(advice.items_per_s / best.items_per_s - 1) < NAMED_SHARE:
                continue
            outcome = f"{_format_rate(question, advice.items_per_s)} {question.workload.unit}/s, {_format_gain(advice, best)}"
        yield f"With {difference}: {outcome} ({_format_configuration(advice)}; {format_memory(advice.predicted)})."


def _describe_rules(judged_rules: Sequence[JudgedRule]) -> Iterator[str]:
    """A sentence with the rules of the studies that the planner agrees with, and one with the others."""
    for agrees, words in ((True, "agrees with"), (False, "DISAGREES with")):
        rules = [judged for judged in judged_rules if judged.agrees == agrees]
        cited = [f"study {judged.rule.study}, {judged.rule.where}{'' if agrees else f' ({judged.why})'}" for judged in rules]
        yield from [f"The planner {words} {'; '.join(dict.fromkeys(cited))}."] if cited else []


def _format_configuration(advice: Advice) -> str:
    """The strategy, and what a matrix needs besides it, in its keys."""
    cell = advice.cell
    keys = [f"micro_batch_size={cell.micro_batch_size}", f"activation_checkpointing={cell.activation_checkpointing}"]
    return " ".join((cell.strategy, _format_mesh(advice), *keys, *_list_sync(advice)))


def _format_mesh(advice: Advice) -> str:
    sizes = {"dp": advice.cell.dp, "tp": advice.cell.tp, "pp": advice.cell.pp}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def _format_batch(advice: Advice) -> str:
    mark = "" if advice.cell.activation_checkpointing == "none" else " ckpt"
    return f"{advice.cell.micro_batch_size} x {advice.cell.gradient_accumulation_steps}{mark}"


def _list_sync(advice: Advice) -> list[str]:
    """The option `sync`, if the strategy has it and it is not the default."""
    sync = advice.cell.options.get("sync")
    return [] if sync in (None, "last_pass") else [f"sync={sync}"]


def _format_rate(question: Question, items_per_s: float) -> str:
    """A throughput in the unit of the workload, with three significant digits."""
    return format_amount(float(f"{items_per_s * (question.seq_len or 1):.3g}"))


def _format_gain(advice: Advice, other: Advice) -> str:
    """How much faster or slower the advice is than another one, in words."""
    ratio = (advice.items_per_s or 0.0) / (other.items_per_s or 1.0)
    return f"{abs(100 * (ratio - 1)):.0f} % {'faster' if ratio >= 1 else 'slower'}"
