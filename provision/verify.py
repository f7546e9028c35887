"""The acceptance checks of a node: a machine is ready when it has shown so, not when its installation has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from provision.checks import Check, Outcome
from provision.facts import Unanswered
from provision.operations import Target


@dataclass(frozen=True)
class Finding:
    """The outcome of one check on one node."""

    node: str
    check: str
    outcome: Outcome


def verify(targets: Iterable[Target], checks: Sequence[Check], begins: Callable[[str], None]) -> list[Finding]:
    """Every check on every node; `begins` is told which one, as some take seconds."""
    findings = []
    for target in targets:
        for check in checks:
            begins(f"{target.node.name}: checking {check.name}")
            findings.append(Finding(target.node.name, check.name, _outcome(check, target)))
    return findings


def verified(findings: Sequence[Finding]) -> bool | None:
    """True where some check passed and none failed; None where nothing was checked."""
    outcomes = [finding.outcome.passed for finding in findings]
    return None if not outcomes else False not in outcomes and True in outcomes


def _outcome(check: Check, target: Target) -> Outcome:
    try:
        return check.run(target)
    except Unanswered as error:
        return Outcome(False, str(error), "once the node answers, run: provision CLUSTER.yaml verify")
