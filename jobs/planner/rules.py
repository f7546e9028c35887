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

    def applies(self, value_by_name: Mapping[str, float | bool | str]) -> bool:
        """Whether the condition of the rule is true. value_by_name: the values of the names in the condition
        (`advise.make_rule_values`)."""
        return bool(Expression(self.when).evaluate(value_by_name))


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


def judge_rules(value_by_name: Mapping[str, float | bool | str], rate_by_strategy: Mapping[str, float]) -> list[JudgedRule]:
    """The rules whose condition is true. rate_by_strategy: for each strategy that fits, by its name, the throughput of its best
    configuration, in any unit."""
    best_rate = max(rate_by_strategy.values(), default=0.0)
    return [_judge_rule(rule, rate_by_strategy, best_rate) for rule in read_rules() if rule.applies(value_by_name)]


def _judge_rule(rule: DecisionRule, rate_by_strategy: Mapping[str, float], best_rate: float) -> JudgedRule:
    ranked_strategies: Sequence[tuple[str, float]] = sorted(
        ((strategy, rate_by_strategy[strategy]) for strategy in rule.recommends if strategy in rate_by_strategy),
        key=lambda strategy_pair: -strategy_pair[1],
    )
    if not ranked_strategies:
        return JudgedRule(rule, False, f"none of {', '.join(rule.recommends)} fits, or its time is not known")
    strategy, rate = ranked_strategies[0]
    if rate >= AGREEMENT_SHARE * best_rate:
        return JudgedRule(rule, True, f"{strategy} has {100 * rate / best_rate:.0f} % of the highest throughput")
    return JudgedRule(rule, False, f"{strategy} has only {100 * rate / best_rate:.0f} % of the highest throughput")
