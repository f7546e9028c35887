"""Runs the acceptance checks, because a node is ready only when its checks pass, and not already when its installation ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from provision.check import Check, Outcome, map_targets
from provision.fact import Unanswered
from provision.node import last_line
from provision.operation import Site, Target
from shardlab.remote.remote import Unreachable

ANSWER_LIMIT_S = 10.0
ADVICE = "once the node answers, run: provision CLUSTER.yaml verify"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check on one node."""

    node: str
    check: str
    outcome: Outcome


def verify_targets(
    site: Site, targets: Sequence[Target], stages: Sequence[Sequence[Check]], show_stage: Callable[[str], None]
) -> list[Finding]:
    """Run the stages of checks one after the other; the checks of a stage run at the same time on all nodes.

    show_stage: called before each stage with a text that names its checks, because some checks take seconds.

    Before each stage, a trivial command is run on every node. A node that does not answer gets one finding, its checks are
    skipped, and checks of all nodes together leave this node out.
    """
    findings: list[Finding] = []
    for stage in filter(None, stages):
        failures = _find_unreachable(site)
        site.skipped.update(failures)
        names = [target.node.name for target in targets]
        findings += [Finding(name, "answers", Outcome(False, why, ADVICE)) for name, why in failures.items() if name in names]
        reachable_targets = [target for target in targets if target.node.name not in site.skipped]
        if not reachable_targets:
            break
        show_stage(f"checking {', '.join(check.name for check in stage)}")
        jobs = [(check, target) for check in stage for target in (reachable_targets[:1] if check.once else reachable_targets)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            findings += pool.map(lambda job: Finding(job[1].node.name, job[0].name, _run_check(job[0], site, job[1])), jobs)
    return findings


def _find_unreachable(site: Site) -> dict[str, str]:
    """The nodes that do not answer now, by name, with the reason. Nodes that failed before are not asked."""

    def ask(target: Target) -> str | None:
        try:
            answer = target.node.run(["true"], timeout_s=ANSWER_LIMIT_S)
        except Unreachable as error:
            return str(error)
        if answer.code is None:
            return f"{target.node.name}: it does not answer within {ANSWER_LIMIT_S:g} s"
        return f"{target.node.name}: it cannot run commands: {last_line(answer)}" if answer.code else None

    answers = zip(site.active_targets, map_targets(site.active_targets, ask), strict=True)
    return {target.node.name: why for target, why in answers if why is not None}


def is_verified(findings: Sequence[Finding]) -> bool | None:
    """True if at least one check passed and no check failed; None if no check was made; otherwise False."""
    outcomes = [finding.outcome.passed for finding in findings]
    return None if not outcomes else False not in outcomes and True in outcomes


def _run_check(check: Check, site: Site, target: Target) -> Outcome:
    try:
        return check.run(site, target)
    except (Unanswered, Unreachable) as error:
        return Outcome(False, str(error), ADVICE)
