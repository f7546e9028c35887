"""The acceptance checks of a node: a machine is ready when it has shown so, not when its installation has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from provision.checks import Check, Outcome
from provision.facts import Unanswered
from provision.operations import Site, Target
from shardlab.remote import Unreachable


@dataclass(frozen=True)
class Finding:
    """The outcome of one check on one node."""

    node: str
    check: str
    outcome: Outcome


def verify(site: Site, targets: Sequence[Target], checks: Sequence[Check], begins: Callable[[str], None]) -> list[Finding]:
    """Every check, one after the other, each on all nodes at once; `begins` is told which one, as some take seconds."""
    findings: list[Finding] = []
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        for check in checks:
            begins(f"checking {check.name}")
            asked = targets[:1] if check.once else targets

            def work(target: Target, check: Check = check) -> Finding:
                return Finding(target.node.name, check.name, _outcome(check, site, target))

            findings += pool.map(work, asked)
    return findings


def verified(findings: Sequence[Finding]) -> bool | None:
    """True where some check passed and none failed; None where nothing was checked."""
    outcomes = [finding.outcome.passed for finding in findings]
    return None if not outcomes else False not in outcomes and True in outcomes


def _outcome(check: Check, site: Site, target: Target) -> Outcome:
    try:
        return check.run(site, target)
    except (Unanswered, Unreachable) as error:
        return Outcome(False, str(error), "once the node answers, run: provision CLUSTER.yaml verify")
