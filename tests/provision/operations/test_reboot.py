"""Tests of reboots without a machine: a reboot is requested once and proven by a new boot id; then the operation is planned
again. test_practice_e2e.py tests a real reboot."""

import pytest

from provision.fact import FactAnswers, Unanswered
from provision.operation import Nothing, Operation, Site, Target, shell_change
from provision.operations.reboot import BOOT_ID, Reboot
from provision.plan import converge_site
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.remote.remote import CommandOutput, Unreachable


class Machine:
    """A fake node with a boot id. `after` lists its state at each question after a reboot: "away", or its boot id."""

    name, host, port, user, python, wheelhouse, may_sudo = "w1", "10.0.0.1", None, None, "python", None, True

    def __init__(self, after=("away", "away", "boot-2")):
        self.after, self.boot, self.ran = list(after), "boot-1", []

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False):
        self.ran.append(" ".join(argv))
        if argv == ["systemctl", "reboot"]:
            self.boot = "down"
            raise Unreachable("w1: the connection broke.")
        if argv == ["cat", BOOT_ID]:
            if self.boot == "down":
                self.boot = self.after.pop(0) if len(self.after) > 1 else self.after[0]
            now, self.boot = self.boot, "down" if self.boot == "away" else self.boot
            if now == "away":
                raise Unreachable("w1: cannot be reached.")
            return CommandOutput(0, f"{now}\n", "")
        return CommandOutput(0, "", "")


def test_a_reboot_is_proven_by_another_boot():
    machine = Machine()
    Reboot("it is told to", pause_s=0).make(machine)
    assert machine.ran.count(f"cat {BOOT_ID}") == 4
    assert machine.ran[-1] == "systemctl is-system-running --wait"


@pytest.mark.parametrize(("after", "says"), [(["boot-1"], "it has not rebooted"), (["away"], "it does not answer")])
def test_a_reboot_that_does_not_end_says_so(after, says):
    with pytest.raises(Unanswered, match=says):
        Reboot("it is told to", limit_s=0.05, pause_s=0.01).make(Machine(after))


def restarted(wanted):
    """Lets `converge_site` run one operation. wanted: maps a boot id to the plan of the operation at this boot."""
    machine = Machine()
    target = Target(machine, FactAnswers(machine), NodeEntry(name="w1"))
    operation = Operation("it", lambda site, target: wanted[target.node.boot])
    one = Site(Cluster(schema=1, name="bench", provider="ssh"), None, [target])
    (step,) = converge_site(one, [operation], targets=[target], only_names={"it"}, is_dry_run=False)
    return machine, step


def test_the_remaining_changes_are_planned_and_made_after_a_reboot():
    machine, step = restarted({"boot-1": [Reboot("of it", pause_s=0)], "boot-2": [shell_change("go on", "true")]})
    assert (step.state, step.changes, step.says[-1]) == ("changed", 2, "go on")
    assert machine.ran[-1] == "sh -euc true"
    _, step = restarted({"boot-1": [Reboot("of it", pause_s=0)], "boot-2": Nothing("done")})
    assert (step.state, step.changes) == ("changed", 1)


def test_no_machine_is_rebooted_twice():
    again = [shell_change("never", "false"), Reboot("nouveau drives its GPUs", pause_s=0)]
    machine, step = restarted({"boot-1": [Reboot("nouveau drives its GPUs", pause_s=0)], "boot-2": again})
    assert (step.state, step.changes) == ("failed", 1)
    assert step.says[-1] == "w1: it was rebooted once, but still nouveau drives its GPUs; inspect this node by hand"
    assert machine.ran.count("systemctl reboot") == 1
    assert "sh -euc false" not in machine.ran
