"""Runs the acceptance checks, because a node is ready only when its checks pass, and not already when its installation ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from provision.check import Check, Outcome, map_targets
from provision.fact import Unanswered
from provision.node import find_error_line
from provision.operation import Site, Target
from shardlab.remote.remote import Unreachable

ANSWER_LIMIT_S = 10.0
VERIFY_ADVICE = "once the node answers, run: provision CLUSTER.yaml verify"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check on one node."""

    node: str
    check: str
    outcome: Outcome


def verify_targets(
    site: Site, targets: Sequence[Target], check_stages: Sequence[Sequence[Check]], show_stage: Callable[[str], None]
) -> list[Finding]:
    """Run the stages of checks one after the other; the checks of a stage run at the same time on all nodes.

    show_stage: called before each stage with a text that names its checks, because some checks take seconds.

    Before each stage, a trivial command is run on every node. A node that does not answer gets one finding, its checks are
    skipped, and checks of all nodes together leave this node out.
    """
    findings: list[Finding] = []
    for stage_checks in filter(None, check_stages):
        reason_by_node = _find_unreachable(site)
        site.skipped.update(reason_by_node)
        target_names = [target.node.name for target in targets]
        findings += [
            Finding(name, "answers", Outcome(False, reason, VERIFY_ADVICE))
            for name, reason in reason_by_node.items()
            if name in target_names
        ]
        reachable_targets = [target for target in targets if target.node.name not in site.skipped]
        if not reachable_targets:
            break
        show_stage(f"checking {', '.join(check.name for check in stage_checks)}")
        check_jobs = [
            (check, target) for check in stage_checks for target in (reachable_targets[:1] if check.once else reachable_targets)
        ]
        with ThreadPoolExecutor(len(check_jobs)) as thread_pool:
            findings += thread_pool.map(
                lambda job: Finding(job[1].node.name, job[0].name, _run_check(job[0], site, job[1])), check_jobs
            )
    return findings


def _find_unreachable(site: Site) -> dict[str, str]:
    """The nodes that do not answer now, by name, with the reason. Nodes that failed before are not asked."""

    def ask_target(target: Target) -> str | None:
        try:
            command_output = target.node.run(["true"], timeout_s=ANSWER_LIMIT_S)
        except Unreachable as error:
            return str(error)
        if command_output.code is None:
            return f"{target.node.name}: it does not answer within {ANSWER_LIMIT_S:g} s"
        return f"{target.node.name}: it cannot run commands: {find_error_line(command_output)}" if command_output.code else None

    target_reasons = zip(site.active_targets, map_targets(site.active_targets, ask_target), strict=True)
    return {target.node.name: reason for target, reason in target_reasons if reason is not None}


def is_verified(findings: Sequence[Finding]) -> bool | None:
    """True if at least one check passed and no check failed; None if no check was made; otherwise False."""
    outcomes = [finding.outcome.passed for finding in findings]
    return None if not outcomes else False not in outcomes and True in outcomes


def _run_check(check: Check, site: Site, target: Target) -> Outcome:
    try:
        return check.run(site, target)
    except (Unanswered, Unreachable) as error:
        return Outcome(False, str(error), VERIFY_ADVICE)
