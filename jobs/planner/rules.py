"""The advice of the studies on which strategy to choose, as rules (rules.yaml), and whether the planner agrees with each
rule."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec

from shardlab.matrix.expression import Expression


class DecisionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of rules.yaml: the advice of a study on which strategies to use under a condition."""

    id: str
    """Name of the rule."""
    study: int
    """Number of the study."""
    where: str
    """Place in the study."""
    when: str
    """Condition on the model and the GPUs."""
    recommends: tuple[str, ...]
    """Names of strategies."""
    says: str
    """What the study says, in a sentence."""

    def applies(self, facts: Mapping[str, float | bool | str]) -> bool:
        """Whether the condition of the rule is true. facts: the values of the names in the condition
        (`advise.make_rule_values`)."""
        return bool(Expression(self.when).evaluate(facts))


class JudgedRule(msgspec.Struct, frozen=True):
    """A rule whose condition is true."""

    rule: DecisionRule
    """The rule of a study."""
    agrees: bool
    """Whether the planner predicts for a recommended strategy at least 95 % of the highest throughput."""
    why: str


@functools.cache
def read_rules() -> tuple[DecisionRule, ...]:
    """The rules of rules.yaml, in the order of the file."""
    yaml_bytes = resources.files("jobs.planner").joinpath("rules.yaml").read_bytes()
    return msgspec.yaml.decode(yaml_bytes, type=tuple[DecisionRule, ...])


AGREEMENT_SHARE = 0.95  # share of the highest throughput; throughputs above it differ less than the error of the planner


def judge_rules(facts: Mapping[str, float | bool | str], throughputs: Mapping[str, float]) -> list[JudgedRule]:
    """The rules whose condition is true. throughputs: for each strategy that fits, by its name, the throughput of its best
    configuration, in any unit."""
    best_throughput = max(throughputs.values(), default=0.0)
    return [_judge_rule(rule, throughputs, best_throughput) for rule in read_rules() if rule.applies(facts)]


def _judge_rule(rule: DecisionRule, throughputs: Mapping[str, float], best_throughput: float) -> JudgedRule:
    ranked_strategies: Sequence[tuple[str, float]] = sorted(
        ((strategy, throughputs[strategy]) for strategy in rule.recommends if strategy in throughputs),
        key=lambda strategy_pair: -strategy_pair[1],
    )
    if not ranked_strategies:
        return JudgedRule(rule, False, f"none of {', '.join(rule.recommends)} fits, or its time is not known")
    strategy, throughput = ranked_strategies[0]
    if throughput >= AGREEMENT_SHARE * best_throughput:
        return JudgedRule(rule, True, f"{strategy} has {100 * throughput / best_throughput:.0f} % of the highest throughput")
    return JudgedRule(rule, False, f"{strategy} has only {100 * throughput / best_throughput:.0f} % of the highest throughput")
