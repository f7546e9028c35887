"""Sets up Slurm: first accounting and the controller, then the workers, which get their configuration from the controller."""

from __future__ import annotations

import msgspec

from provision.fact import Unanswered
from provision.facts.files import FILES
from provision.facts.nodes import FORMAT, NODES, SlurmNode
from provision.facts.nodes import parse as parse_nodes
from provision.facts.services import SERVICES
from provision.node import Node, last_line
from provision.operation import Change, Nothing, On, Operation, RunCommand, Site, Target, Write, shell
from provision.operations.existing_slurm import check, existing, used
from provision.operations.service import running
from provision.operations.slurm_files import CGROUP, CONF, GRES, accounts, files
from templates import render

DATABASE = "slurm_acct_db"
DBD = "/etc/slurm/slurmdbd.conf"
WORKER_OPTIONS, WORKER_UNIT = "/etc/default/slurmd", "/etc/systemd/system/slurmd.service.d/configless.conf"
# Makes the database and its user; the statements have no effect if they exist.
SQL = (
    f"CREATE DATABASE IF NOT EXISTS {DATABASE}; CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA unix_socket; "
    f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'localhost';"
)
HEALTHY = frozenset({"idle", "alloc", "mix", "comp"})
DRAINED, DOWN = frozenset({"drain", "drng"}), frozenset({"down", "fail", "failg"})
READY_S = 60.0
SLURM = "slurm"  # the user that Slurm reports if Slurm itself drained a node
OURS = "shardlab:"  # the beginning of the reason if `provision` asked the user to drain a node
AWAY = ("Not responding", "Node unexpectedly rebooted")  # reasons of Slurm that no longer hold when slurmd runs on the node
SMALLER = ("Low RealMemory", "Low CPUs", "Low socket*core")  # reasons that no longer hold when slurm.conf is correct


def plan_accounts(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up accounting on the controller: MariaDB and slurmdbd. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("controller"):
        return Nothing("it does no accounting")
    if (there := existing(site)) is not None:
        return used(there)
    changes = running(target, "mariadb", [])
    wanted = accounts(site)
    if _differs(target, DBD, wanted, 0o600, "slurm:slurm"):
        changes.append(shell("make the accounting database", f'mariadb --batch -e "{SQL}"', timeout_s=120))
        # this file is written after the database was made: if it exists, the database exists
        changes.append(Write(f"write {DBD}", DBD, wanted, 0o600, "slurm:slurm"))
    changes += running(target, "slurmdbd", [DBD], changed=bool(changes))
    return changes or Nothing("slurmdbd runs with MariaDB")


def plan_controller(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up slurmctld on the controller, with its configuration files. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("controller"):
        return Nothing("it is not the controller")
    if (there := existing(site)) is not None:
        return used(there)
    absent = site.absent("worker")
    if (
        absent and CONF in target.facts[FILES]
    ):  # the facts for the line of an absent worker are missing, and a slurm.conf without this line would end the worker's jobs
        return running(target, "slurmctld", [CONF]) or Nothing(f"slurm.conf not changed: {', '.join(absent)} cannot be asked")
    changes: list[Change] = []
    wanted = files(site)
    # slurm.conf is written last: if it exists, all other files exist.
    for path, content in sorted(wanted.items(), key=lambda file: file[0] == CONF):
        if _differs(target, path, content):
            changes.append(Write(f"write {path}", path, content))
    if changes:  # slurmdbd answers some seconds after its start; slurmctld does not start if it never reached slurmdbd
        wait = (
            "for n in $(seq 60); do sacctmgr -nP show user >/dev/null 2>&1 && exit 0; sleep 0.5; done; sacctmgr -nP show user"
        )
        changes.append(shell("wait until slurmdbd answers", wait, timeout_s=60))
    changes += running(target, "slurmctld", [*wanted], changed=bool(changes))
    return changes or Nothing("slurmctld runs with the right configuration")


def plan_worker(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up slurmd on a worker. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("worker"):
        return Nothing("it is not a worker")
    if (there := existing(site)) is not None:
        return used(there)
    (controller,) = site.with_role("controller")
    if controller.node.name in site.skipped:
        return Nothing(f"{controller.node.name}, which has the configuration, cannot be asked")
    changes: list[Change] = []
    options = f'SLURMD_OPTIONS="--conf-server {controller.node.address}:6817 -N {target.node.name}"\n'.encode()
    unit = render("slurm/configless.conf.j2").encode()
    if _differs(target, WORKER_UNIT, unit):
        changes.append(RunCommand("make a folder for our settings of slurmd", ["mkdir", "-p", WORKER_UNIT.rpartition("/")[0]]))
        changes.append(Write(f"write {WORKER_UNIT}", WORKER_UNIT, unit))
        changes.append(RunCommand("make systemd read this file", ["systemctl", "daemon-reload"]))
    if _differs(target, WORKER_OPTIONS, options):
        changes.append(Write(f"write {WORKER_OPTIONS}", WORKER_OPTIONS, options))
    conf = controller.facts[FILES].get(CONF)
    changes += running(target, "slurmd", [WORKER_UNIT, WORKER_OPTIONS], changed=bool(changes))
    if not changes and conf is not None and _is_older(target, conf.written_s):
        changes.append(
            RunCommand(
                "restart slurmd, because the controller's configuration changed", ["systemctl", "restart", "slurmd"], 120
            )
        )
    return changes or Nothing("slurmd runs with the controller's configuration")


def plan_nodes(site: Site, target: Target) -> list[Change] | Nothing:
    """Make sure that every worker is registered in Slurm and ready for jobs. Raises Unanswered.

    A drained worker is resumed if `provision` drained it, or if Slurm drained it for a reason that no longer holds. A worker
    that a person drained is not changed; the operation fails on it, with the reason and the command that resumes the worker.
    """
    if site.cluster.slurm is None:
        return Nothing("the cluster has no Slurm")
    if (there := existing(site)) is not None:
        return check(site, there)
    (controller,) = site.with_role("controller")
    if controller.node.name in site.skipped:
        return Nothing("the controller cannot be asked")
    workers = {worker.node.name: worker for worker in site.with_role("worker") if worker.node.name not in site.skipped}
    states = controller.facts[NODES]
    known = {name: states.get(name, SlurmNode("not registered")) for name in workers}
    bad = {name: node for name, node in known.items() if node.state not in HEALTHY}
    if not bad:
        return Nothing(f"{len(workers)} workers are ready")
    resumed = [name for name, node in bad.items() if node.state in DRAINED and _may_resume(site, workers[name], node)]
    kept = {name: _unavailable(controller, name, node) for name, node in bad.items() if _is_kept(node) and name not in resumed}
    if kept:
        raise Unanswered("; ".join(kept.values()), kept)
    changes: list[Change] = []
    for name in resumed:
        says = f"resume {name}, whose state in Slurm is {bad[name].state} ({bad[name].reason})"
        changes.append(On(controller.node, shell(says, _resume_script(name))))
    return [
        *changes,
        Registration(controller, tuple(workers), ", ".join(f"{name}: {node.state}" for name, node in bad.items())),
    ]


class Registration(msgspec.Struct, frozen=True):
    """A change that waits until all workers can get jobs. found: the states of the workers that could not get jobs, as text."""

    controller: Target
    workers: tuple[str, ...]
    found: str

    @property
    def says(self) -> str:
        return f"wait until all workers are ready ({self.found})"

    @property
    def command(self) -> str:
        names = ",".join(self.workers)
        return f"""\
for n in $(seq {2 * READY_S:.0f}); do
    ready=$(sinfo -hN -n {names} -o '%N %t' | sort -u | grep -cE ' ({"|".join(sorted(HEALTHY))})$')
    test "$ready" = {len(self.workers)} && exit 0
    sleep 0.5
done
sinfo -hN -n {names} -o '{FORMAT}'
exit 1"""

    @property
    def script(self) -> str:
        return ""

    def make(self, node: Node) -> None:
        """Wait on the controller. Raises Unanswered, which blames the workers that are still not ready."""
        answer = self.controller.node.run(["sh", "-c", self.command], timeout_s=READY_S + 30)
        if answer.code == 0:
            return
        try:
            states = parse_nodes(answer.stdout)
        except ValueError:  # the output is not a list of nodes
            states = {}
        blames = {
            name: _unavailable(self.controller, name, state)
            for name in self.workers
            if (state := states.get(name, SlurmNode("not registered"))).state not in HEALTHY
        }
        if not states:
            blames = {self.controller.node.name: f"{self.controller.node.name}: Slurm does not answer: {last_line(answer)}"}
        raise Unanswered("; ".join(blames.values()), blames)


def _may_resume(site: Site, worker: Target, drained: SlurmNode) -> bool:
    """Whether a worker was drained by `provision`, or by Slurm for a reason that no longer holds according to its facts."""
    if drained.reason.startswith(OURS):
        return True
    if drained.user != SLURM:
        return False
    runs = worker.facts[SERVICES].get("slurmd")
    if runs is None or runs.state != "active":
        return False
    if drained.reason.startswith(AWAY):
        return True
    # the reason no longer holds if slurm.conf is up to date; an earlier operation restarted slurmd after slurm.conf was written
    (controller,) = site.with_role("controller")
    return drained.reason.startswith(SMALLER) and not any(
        _differs(controller, path, content) for path, content in files(site).items()
    )


def _is_kept(state: SlurmNode) -> bool:
    """Whether waiting for a node is useless, because the node is drained or a person set it to down."""
    return state.state in DRAINED or (state.state in DOWN and state.user not in ("", SLURM))


def _unavailable(controller: Target, name: str, state: SlurmNode) -> str:
    """A sentence that says why a worker gets no jobs, with the command that makes it available again. name: the worker."""
    if not state.reason:
        return f"{name}: Slurm reports the state {state.state} and gives no reason; on {name}, run: journalctl -u slurmd"
    who = "Slurm itself" if state.user == SLURM else f"the user {state.user}"
    return (
        f"{name}: Slurm reports the state {state.state}; the reason, given by {who}, is: {state.reason}. The state was not "
        f"changed; when the cause is fixed, run on {controller.node.name}: sudo {_resume(name)}"
    )


def _resume(name: str) -> str:
    return f"scontrol update nodename={name} state=resume"


def _resume_script(name: str) -> str:
    """A shell script that resumes a drained worker in Slurm. The script fails if the worker is still drained afterwards.

    Slurm refuses to resume a worker that is no longer drained: Slurm may have resumed the worker itself when slurmd registered,
    or slurmctld may have restarted after the state was read. In this case the script succeeds, and the next change,
    `Registration`, checks whether the worker becomes ready.
    """
    drained = " | ".join(f"{state}*" for state in sorted(DRAINED))
    return f"""\
said=$({_resume(name)} 2>&1) && exit 0
case "$(sinfo -h -N -n {name} -o %t | sort -u)" in '' | {drained}) ;; *) exit 0 ;; esac
echo "$said" >&2
exit 1"""


def _is_older(target: Target, moment_s: float) -> bool:
    since = target.facts[SERVICES]["slurmd"].since_s
    return since is not None and since < moment_s


def _differs(target: Target, path: str, content: bytes, mode: int = 0o644, owner: str = "root:root") -> bool:
    file = target.facts[FILES].get(path)
    return file is None or not file.holds(content) or (file.mode, file.owner) != (mode, owner)


ACCOUNTS = Operation("slurm-accounts", plan_accounts, files=(DBD,))
CONTROLLER = Operation("slurm-controller", plan_controller, files=(CONF, GRES, CGROUP))
WORKERS = Operation("slurm-workers", plan_worker, files=(WORKER_OPTIONS, WORKER_UNIT))
REGISTERED = Operation("slurm-nodes", plan_nodes, once=True)
