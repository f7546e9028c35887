"""Runs the acceptance checks, because a node is ready only when its checks pass, and not already when its installation ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from provision.check import Check, Outcome, each
from provision.fact import Unanswered
from provision.node import last_line
from provision.operation import Site, Target
from shardlab.remote.remote import Unreachable

ANSWERS_S = 10.0
ADVICE = "once the node answers, run: provision CLUSTER.yaml verify"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check on one node."""

    node: str
    check: str
    outcome: Outcome


def verify(
    site: Site, targets: Sequence[Target], stages: Sequence[Sequence[Check]], begins: Callable[[str], None]
) -> list[Finding]:
    """Run the stages of checks one after the other; the checks of a stage run at the same time on all nodes.

    begins: called before each stage with a text that names its checks, because some checks take seconds.

    Before each stage, a trivial command is run on every node. A node that does not answer gets one finding, its checks are
    skipped, and checks of all nodes together leave this node out.
    """
    findings: list[Finding] = []
    for stage in filter(None, stages):
        away = _away(site)
        site.skipped.update(away)
        names = [target.node.name for target in targets]
        findings += [Finding(name, "answers", Outcome(False, why, ADVICE)) for name, why in away.items() if name in names]
        asked = [target for target in targets if target.node.name not in site.skipped]
        if not asked:
            break
        begins(f"checking {', '.join(check.name for check in stage)}")
        work = [(check, target) for check in stage for target in (asked[:1] if check.once else asked)]
        with ThreadPoolExecutor(len(work)) as pool:
            findings += pool.map(lambda pair: Finding(pair[1].node.name, pair[0].name, _outcome(pair[0], site, pair[1])), work)
    return findings


def _away(site: Site) -> dict[str, str]:
    """The nodes that do not answer now, by name, with the reason. Nodes that failed before are not asked."""

    def ask(target: Target) -> str | None:
        try:
            answer = target.node.run(["true"], timeout_s=ANSWERS_S)
        except Unreachable as error:
            return str(error)
        if answer.code is None:
            return f"{target.node.name}: it does not answer within {ANSWERS_S:g} s"
        return f"{target.node.name}: it cannot run commands: {last_line(answer)}" if answer.code else None

    said = zip(site.standing, each(site.standing, ask), strict=True)
    return {target.node.name: why for target, why in said if why is not None}


def verified(findings: Sequence[Finding]) -> bool | None:
    """True if at least one check passed and no check failed; None if no check was made; otherwise False."""
    outcomes = [finding.outcome.passed for finding in findings]
    return None if not outcomes else False not in outcomes and True in outcomes


def _outcome(check: Check, site: Site, target: Target) -> Outcome:
    try:
        return check.run(site, target)
    except (Unanswered, Unreachable) as error:
        return Outcome(False, str(error), ADVICE)
