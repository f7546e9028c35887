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
    line_width = min(out.width or MOST_COLUMNS, MOST_COLUMNS)
    best_by_strategy = {advice.cell.strategy: advice for advice in reversed(report.ranked)}
    strategy_advice = [advice for advice in report.ranked if best_by_strategy[advice.cell.strategy] is advice]
    timed_advice = [advice for advice in strategy_advice if advice.group is not None]

    def print_wrapped(sentences: Iterator[str]) -> None:
        for sentence in sentences:
            for line in textwrap.wrap(sentence, line_width, subsequent_indent="  ", break_on_hyphens=False):
                out.print_line(line)

    print_wrapped(_recommend_strategy(question, timed_advice))
    print_wrapped(_describe_question(question, is_default_batch=is_default_batch))
    if timed_advice:
        out.show_table(plain_table.fit_table(_make_table(question, timed_advice), line_width))
    print_wrapped(_explain_missing(strategy_advice[len(timed_advice) :]))
    if timed_advice:
        print_wrapped(_describe_changes(question, report, timed_advice[0]))
        print_wrapped(_describe_rules(report.rules))


def _recommend_strategy(question: Question, timed_advice: Sequence[Advice]) -> Iterator[str]:
    """A sentence with the recommendation and its reason, and one with its numbers. timed_advice: the strategies with a
    throughput."""
    if not timed_advice:
        yield "No strategy can be recommended: of none it is known that it fits and how fast it is."
        return
    best_advice, next_advice = timed_advice[0], timed_advice[1] if len(timed_advice) > 1 else None
    tie_count = sum(advice.group == 1 for advice in timed_advice)
    if next_advice is None:
        reason_clause = f"it is the only strategy with {question.precision} that fits and whose time is known"
    elif tie_count == 1:
        gain_text = _format_gain(next_advice, best_advice)
        reason_clause = f"the next, {next_advice.cell.strategy}, is {gain_text} ({', '.join(next_advice.reasons)})"
    elif best_advice.cell.strategy in ("single", "ddp"):
        reason_clause = "each GPU holds the whole model, and no strategy that shards it is more than 5 % faster"
    else:
        merit = (
            "PyTorch develops it first"
            if best_advice.cell.strategy.startswith("fsdp2")
            else "it is the simplest still developed"
        )
        reason_clause = (
            f"{tie_count} strategies are within 5 % of the fastest, which the planner cannot tell apart; of these, {merit}"
        )
    yield f"Use {_format_configuration(best_advice)}: {reason_clause}."
    range_per_s, step_s = best_advice.range_per_s, best_advice.predicted.step_s
    assert range_per_s is not None
    assert step_s is not None
    low_text, likely_text, high_text = (
        _format_rate(question, items_per_s) for items_per_s in (range_per_s.low, range_per_s.likely, range_per_s.high)
    )
    yield (
        f"Predicted: {likely_text} {question.workload.unit}/s ({low_text} to {high_text}); a step of "
        f"{format_duration(step_s.likely)}: {', '.join(best_advice.reasons)}; {format_memory(best_advice.predicted)} of memory "
        f"(fits: {best_advice.predicted.fits})."
    )


def _describe_question(question: Question, *, is_default_batch: bool) -> Iterator[str]:
    machine, seq_len = question.machine, question.seq_len
    link_names = [
        link.name
        for link in (machine.link_inside_node, machine.link_between_nodes if question.nodes > 1 else None)
        if link is not None
    ]
    batch_text = f"{question.global_batch:,} {question.workload.unit}"
    if seq_len is not None:
        batch_text = f"{question.global_batch:,} sequences of {seq_len:,} tokens ({seq_len * question.global_batch:,} tokens)"
    gpu_name = machine.gpu_name if machine.gpu_model is None else device_profile.format_gpu_name(machine.gpu_model)
    capacity_text = "" if machine.gpu_memory_bytes is None else f" ({format_size(machine.gpu_memory_bytes.likely)})"
    yield (
        f"All strategies do the same work: {question.workload.name} ({question.facts.parameters:,} "
        f"parameters) in {question.precision} on {question.gpus} x {gpu_name}{capacity_text}, {question.nodes} node(s), "
        f"{' and '.join(link_names)}; {batch_text} a step{' (the default; --global-batch N)' if is_default_batch else ''}."
    )


def _make_table(question: Question, timed_advice: Sequence[Advice]) -> Table[Advice]:
    first_by_group = {advice.group or 0: advice for advice in reversed(timed_advice)}
    number_by_id = {id(first_by_group[group]): str(number) for number, group in enumerate(sorted(first_by_group), 1)}
    columns: list[Column[Advice]] = [
        Column("", lambda advice: number_by_id.get(id(advice), "")),
        Column("strategy", lambda advice: advice.cell.strategy),
        Column("mesh", _format_mesh),
        Column("batch", _format_batch, is_number=False, priority=1),
        Column("sync", lambda advice: "".join(_list_sync_option(advice)).removeprefix("sync="), priority=3),
        Column("memory", lambda advice: format_memory(advice.predicted)),
        Column(f"{question.workload.unit}/s", lambda advice: _format_rate(question, advice.items_per_s or 0.0)),
        Column("slower by", lambda advice: "" if advice is timed_advice[0] else "".join(advice.reasons[:1]), priority=2),
    ]
    return Table(TABLE_TITLE, columns, timed_advice)


def _explain_missing(untimed_advice: Sequence[Advice]) -> Iterator[str]:
    """A sentence for each reason why strategies have no throughput."""
    strategies_by_reason: dict[str, list[str]] = {}
    for advice in untimed_advice:
        memory_text = f" ({format_memory(advice.predicted)})" if advice.predicted.memory_bytes is not None else ""
        strategies_by_reason.setdefault(advice.reasons[0], []).append(f"{advice.cell.strategy}{memory_text}")
    for reason, strategy_texts in strategies_by_reason.items():
        yield f"{reason[0].upper()}{reason[1:]}: {', '.join(strategy_texts)}."


def _describe_changes(question: Question, report: AdviceReport, best_advice: Advice) -> Iterator[str]:
    """What would change the advice, with the predicted numbers. A change of the throughput by less than 2 % is left out."""
    for difference, advice in report.changes.items():
        outcome_text = DOES_NOT_FIT
        if advice.items_per_s is not None and best_advice.items_per_s is not None:
            if abs(advice.items_per_s / best_advice.items_per_s - 1) < NAMED_SHARE:
                continue
            outcome_text = (
                f"{_format_rate(question, advice.items_per_s)} {question.workload.unit}/s, {_format_gain(advice, best_advice)}"
            )
        yield f"With {difference}: {outcome_text} ({_format_configuration(advice)}; {format_memory(advice.predicted)})."


def _describe_rules(judged_rules: Sequence[JudgedRule]) -> Iterator[str]:
    """A sentence with the rules of the studies that the planner agrees with, and one with the others."""
    for agrees, verb_phrase in ((True, "agrees with"), (False, "DISAGREES with")):
        chosen_rules = [judged_rule for judged_rule in judged_rules if judged_rule.agrees == agrees]
        rule_sources = [
            f"study {judged_rule.rule.study}, {judged_rule.rule.where}{'' if agrees else f' ({judged_rule.why})'}"
            for judged_rule in chosen_rules
        ]
        yield from [f"The planner {verb_phrase} {'; '.join(dict.fromkeys(rule_sources))}."] if rule_sources else []


def _format_configuration(advice: Advice) -> str:
    """The strategy, and what a matrix needs besides it, in its keys."""
    cell = advice.cell
    key_texts = [f"micro_batch_size={cell.micro_batch_size}", f"activation_checkpointing={cell.activation_checkpointing}"]
    return " ".join((cell.strategy, _format_mesh(advice), *key_texts, *_list_sync_option(advice)))


def _format_mesh(advice: Advice) -> str:
    degrees = {"dp": advice.cell.dp, "tp": advice.cell.tp, "pp": advice.cell.pp}
    return " ".join(f"{degree_name}={degree}" for degree_name, degree in degrees.items() if degree > 1) or "dp=1"


def _format_batch(advice: Advice) -> str:
    checkpointing_mark = "" if advice.cell.activation_checkpointing == "none" else " ckpt"
    return f"{advice.cell.micro_batch_size} x {advice.cell.gradient_accumulation_steps}{checkpointing_mark}"


def _list_sync_option(advice: Advice) -> list[str]:
    """The option `sync`, if the strategy has it and it is not the default."""
    sync_value = advice.cell.options.get("sync")
    return [] if sync_value in (None, "last_pass") else [f"sync={sync_value}"]


def _format_rate(question: Question, items_per_s: float) -> str:
    """A throughput in the unit of the workload, with three significant digits."""
    return format_amount(float(f"{items_per_s * (question.seq_len or 1):.3g}"))


def _format_gain(advice: Advice, base_advice: Advice) -> str:
    """How much faster or slower the advice is than another one, in words."""
    speed_ratio = (advice.items_per_s or 0.0) / (base_advice.items_per_s or 1.0)
    return f"{abs(100 * (speed_ratio - 1)):.0f} % {'faster' if speed_ratio >= 1 else 'slower'}"
