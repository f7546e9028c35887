"""Time: chrony alone sets each node's clock, and no Slurm starts on one that is off."""

from __future__ import annotations

import functools

from provision import clock
from provision.facts import Unanswered
from provision.facts.services import SERVICES, TIME
from provision.facts.system import SYSTEM
from provision.operations import Change, Here, Nothing, Operation, Run, Site, Target, shell
from provision.operations.service import running
from provision.providers import Node

HOST_CLOCK = "it shares its host's clock"
WAIT_S = 30  # chrony's first measurements take some seconds after its start
# A server that does not answer is no failure of this command: the clock may be right all the same, and is measured next.
STEP = f"chronyc waitsync {WAIT_S} 0 0 1 >/dev/null || true; chronyc makestep"


def plan_daemon(site: Site, target: Target) -> list[Change] | Nothing:
    """chrony runs, and nothing sets the clock beside it. Raises Unanswered."""
    if target.facts[SYSTEM].is_container:
        return Nothing(HOST_CLOCK)
    found = target.facts[SERVICES]
    changes: list[Change] = [
        Run(f"stop {name}, as two that set a clock pull at it", ["systemctl", "disable", "--quiet", "--now", name], 120)
        for name in TIME
        if name in found and (found[name].enabled or found[name].state == "active")
    ]
    changes += running(target, "chrony", [])
    return changes or Nothing("chrony alone sets its clock")


def plan_offset(site: Site, target: Target) -> list[Change] | Nothing:
    """One step of the clock where it is off, after which it has to be right. Raises Unanswered."""
    offset = clock.measure(target.node)
    if offset.agrees:
        return Nothing(str(offset))
    if target.facts[SYSTEM].is_container:
        raise Unanswered(
            f"{target.node.name}: its clock is {offset}, and munge and Slurm would refuse it; {HOST_CLOCK}, which has to be set"
        )
    return [
        shell(f"set the clock, which is {offset}", STEP, timeout_s=WAIT_S + 30),
        Here("measure it again", functools.partial(_hold, target.node)),
    ]


def _hold(node: Node) -> None:
    offset = clock.measure(node)
    if not offset.agrees:
        raise Unanswered(
            f"{node.name}: its clock is {offset}, also after chronyc makestep, and munge and Slurm would refuse it: see there "
            "whether chronyc sources shows a server that answers, and here whether this machine's own clock is right"
        )


TIME_SYNC = Operation("time", plan_daemon)
CLOCK_OFFSET = Operation("clock", plan_offset)
