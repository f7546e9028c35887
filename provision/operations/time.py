"""Makes the clocks of the nodes agree: only chrony sets a node's clock, and a node whose clock is wrong gets no Slurm."""

from __future__ import annotations

import functools

from provision import clock
from provision.fact import Unanswered
from provision.facts.services import SERVICES, TIME_SERVICES
from provision.facts.system import SYSTEM
from provision.node import Node
from provision.operation import Change, LocalCall, Nothing, Operation, RunCommand, Site, Target, shell_change
from provision.operations.service import plan_running_service

HOST_CLOCK = "it is a container, which uses the clock of its host"
WAIT_S = 30  # the most seconds to wait for chrony's first measurements, which take some seconds after its start
# A command that waits for chrony and then sets the clock. It does not fail if no time server answers: the clock may be right
# nevertheless, and is measured afterwards.
STEP_CLOCK = f"chronyc waitsync {WAIT_S} 0 0 1 >/dev/null || true; chronyc makestep"


def plan_chrony(site: Site, target: Target) -> list[Change] | Nothing:
    """Start chrony, and stop every other service that sets the clock. Raises Unanswered."""
    if target.facts[SYSTEM].is_container:
        return Nothing(HOST_CLOCK)
    if not target.node.may_sudo:
        return Nothing("the service that sets its clock stays as it is; the operation clock measures the clock")
    service_by_name = target.facts[SERVICES]
    changes: list[Change] = [
        RunCommand(
            f"stop {name}, because only chrony should set the clock", ["systemctl", "disable", "--quiet", "--now", name], 120
        )
        for name in TIME_SERVICES
        if name in service_by_name and (service_by_name[name].enabled or service_by_name[name].state == "active")
    ]
    changes += plan_running_service(target, "chrony", [])
    return changes or Nothing("only chrony sets its clock")


def plan_clock_offset(site: Site, target: Target) -> list[Change] | Nothing:
    """Set the clock of a node once if it is wrong. Raises Unanswered if the clock is still wrong afterwards."""
    clock_offset = clock.measure_clock_offset(target.node)
    if clock_offset.agrees:
        return Nothing(str(clock_offset))
    if target.facts[SYSTEM].is_container:
        raise Unanswered(
            f"{target.node.name}: its clock is {clock_offset}, so munge and Slurm would refuse it; {HOST_CLOCK}: set that clock"
        )
    return [
        shell_change(f"set the clock, which is {clock_offset}", STEP_CLOCK, timeout_s=WAIT_S + 30),
        LocalCall("measure the clock again", functools.partial(_check_clock, target.node)),
    ]


def _check_clock(node: Node) -> None:
    offset = clock.measure_clock_offset(node)
    if not offset.agrees:
        raise Unanswered(
            f"{node.name}: its clock is {offset}, also after chronyc makestep, so munge and Slurm would refuse it. Check that "
            "chronyc sources on this node shows a server that answers, and that the clock of the machine you work on is right"
        )


TIME_SYNC = Operation("time", plan_chrony)
CLOCK_OFFSET = Operation("clock", plan_clock_offset)
