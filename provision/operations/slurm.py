"""Sets up Slurm: first accounting and the controller, then the workers, which get their configuration from the controller."""

from __future__ import annotations

import msgspec

from provision.fact import Unanswered
from provision.facts.files import FILES
from provision.facts.nodes import NODES, SINFO_FORMAT, SlurmNode
from provision.facts.nodes import parse as parse_nodes
from provision.facts.services import SERVICES
from provision.node import Node, find_error_line
from provision.operation import Change, ChangeOnNode, Nothing, Operation, RunCommand, Site, Target, Write, shell_change
from provision.operations.existing_slurm import check_existing_slurm, find_existing_slurm, report_existing_slurm
from provision.operations.service import plan_running_service
from provision.operations.slurm_files import CGROUP_CONF, GRES_CONF, SLURM_CONF, render_slurm_files, render_slurmdbd_conf
from templates import render

ACCOUNTING_DATABASE = "slurm_acct_db"
DBD_CONF = "/etc/slurm/slurmdbd.conf"
WORKER_OPTIONS, WORKER_UNIT = "/etc/default/slurmd", "/etc/systemd/system/slurmd.service.d/configless.conf"
# Makes the database and its user; the statements have no effect if they exist.
CREATE_DATABASE_SQL = (
    f"CREATE DATABASE IF NOT EXISTS {ACCOUNTING_DATABASE}; CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA "
    f"unix_socket; GRANT ALL ON {ACCOUNTING_DATABASE}.* TO 'slurm'@'localhost';"
)
HEALTHY_STATES = frozenset({"idle", "alloc", "mix", "comp"})
DRAINED_STATES, DOWN_STATES = frozenset({"drain", "drng"}), frozenset({"down", "fail", "failg"})
READY_S = 60.0
SLURM_USER = "slurm"  # the user that Slurm reports if Slurm itself drained a node
SHARDLAB_REASON = "shardlab:"  # the beginning of the reason if `provision` asked the user to drain a node
AWAY_REASONS = ("Not responding", "Node unexpectedly rebooted")  # Slurm's reasons that end when slurmd runs
SMALLER_REASONS = ("Low RealMemory", "Low CPUs", "Low socket*core")  # reasons that no longer hold when slurm.conf is correct


def plan_accounts(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up accounting on the controller: MariaDB and slurmdbd. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has_role("controller"):
        return Nothing("it does no accounting")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    changes = plan_running_service(target, "mariadb", [])
    conf_content = render_slurmdbd_conf(site)
    if _file_differs(target, DBD_CONF, conf_content, 0o600, "slurm:slurm"):
        changes.append(
            shell_change("make the accounting database", f'mariadb --batch -e "{CREATE_DATABASE_SQL}"', timeout_s=120)
        )
        # this file is written after the database was made: if it exists, the database exists
        changes.append(Write(f"write {DBD_CONF}", DBD_CONF, conf_content, 0o600, "slurm:slurm"))
    changes += plan_running_service(target, "slurmdbd", [DBD_CONF], config_changed=bool(changes))
    return changes or Nothing("slurmdbd runs with MariaDB")


def plan_controller(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up slurmctld on the controller, with its configuration files. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has_role("controller"):
        return Nothing("it is not the controller")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    absent_names = site.list_absent_names("worker")
    # The facts for the line of an absent worker are missing, and a slurm.conf without this line would end the worker's jobs
    if absent_names and SLURM_CONF in target.facts[FILES]:
        return plan_running_service(target, "slurmctld", [SLURM_CONF]) or Nothing(
            f"slurm.conf not changed: {', '.join(absent_names)} cannot be asked"
        )
    changes: list[Change] = []
    content_by_path = render_slurm_files(site)
    # slurm.conf is written last: if it exists, all other files exist.
    for path, content in sorted(content_by_path.items(), key=lambda path_and_content: path_and_content[0] == SLURM_CONF):
        if _file_differs(target, path, content):
            changes.append(Write(f"write {path}", path, content))
    if changes:  # slurmdbd answers some seconds after its start; slurmctld does not start if it never reached slurmdbd
        wait_script = (
            "for n in $(seq 60); do sacctmgr -nP show user >/dev/null 2>&1 && exit 0; sleep 0.5; done; sacctmgr -nP show user"
        )
        changes.append(shell_change("wait until slurmdbd answers", wait_script, timeout_s=60))
    changes += plan_running_service(target, "slurmctld", [*content_by_path], config_changed=bool(changes))
    return changes or Nothing("slurmctld runs with the right configuration")


def plan_worker(site: Site, target: Target) -> list[Change] | Nothing:
    """Set up slurmd on a worker. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has_role("worker"):
        return Nothing("it is not a worker")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    (controller,) = site.list_with_role("controller")
    if controller.node.name in site.skipped:
        return Nothing(f"{controller.node.name}, which has the configuration, cannot be asked")
    changes: list[Change] = []
    worker_options = f'SLURMD_OPTIONS="--conf-server {controller.node.address}:6817 -N {target.node.name}"\n'.encode()
    unit_file = render("slurm_conf/configless.conf.j2").encode()
    if _file_differs(target, WORKER_UNIT, unit_file):
        changes.append(RunCommand("make a folder for our settings of slurmd", ["mkdir", "-p", WORKER_UNIT.rpartition("/")[0]]))
        changes.append(Write(f"write {WORKER_UNIT}", WORKER_UNIT, unit_file))
        changes.append(RunCommand("make systemd read this file", ["systemctl", "daemon-reload"]))
    if _file_differs(target, WORKER_OPTIONS, worker_options):
        changes.append(Write(f"write {WORKER_OPTIONS}", WORKER_OPTIONS, worker_options))
    conf_file = controller.facts[FILES].get(SLURM_CONF)
    changes += plan_running_service(target, "slurmd", [WORKER_UNIT, WORKER_OPTIONS], config_changed=bool(changes))
    if not changes and conf_file is not None and _started_before(target, conf_file.written_s):
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
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return check_existing_slurm(site, existing_slurm)
    (controller,) = site.list_with_role("controller")
    if controller.node.name in site.skipped:
        return Nothing("the controller cannot be asked")
    workers = {worker.node.name: worker for worker in site.list_with_role("worker") if worker.node.name not in site.skipped}
    reported_by_name = controller.facts[NODES]
    slurm_node_by_name = {name: reported_by_name.get(name, SlurmNode("not registered")) for name in workers}
    unready = {name: node for name, node in slurm_node_by_name.items() if node.state not in HEALTHY_STATES}
    if not unready:
        return Nothing(f"{len(workers)} workers are ready")
    resumed_names = [
        name for name, node in unready.items() if node.state in DRAINED_STATES and _may_resume(site, workers[name], node)
    ]
    reason_by_node = {
        name: _explain_idle_worker(controller, name, node)
        for name, node in unready.items()
        if _is_unrecoverable(node) and name not in resumed_names
    }
    if reason_by_node:
        raise Unanswered("; ".join(reason_by_node.values()), reason_by_node)
    changes: list[Change] = []
    for name in resumed_names:
        description = f"resume {name}, whose state in Slurm is {unready[name].state} ({unready[name].reason})"
        changes.append(ChangeOnNode(controller.node, shell_change(description, _make_resume_script(name))))
    return [
        *changes,
        WaitForWorkers(controller, tuple(workers), ", ".join(f"{name}: {node.state}" for name, node in unready.items())),
    ]


class WaitForWorkers(msgspec.Struct, frozen=True):
    """A change that waits until all workers can get jobs."""

    controller: Target
    worker_names: tuple[str, ...]
    worker_states: str
    """The states of the workers that could not get jobs, as text."""

    @property
    def description(self) -> str:
        return f"wait until all workers are ready ({self.worker_states})"

    @property
    def command(self) -> str:
        worker_names = ",".join(self.worker_names)
        return f"""\
for n in $(seq {2 * READY_S:.0f}); do
    ready=$(sinfo -hN -n {worker_names} -o '%N %t' | sort -u | grep -cE ' ({"|".join(sorted(HEALTHY_STATES))})$')
    test "$ready" = {len(self.worker_names)} && exit 0
    sleep 0.5
done
sinfo -hN -n {worker_names} -o '{SINFO_FORMAT}'
exit 1"""

    @property
    def script(self) -> str:
        return ""

    def make(self, node: Node) -> None:
        """Wait on the controller. Raises Unanswered, which blames the workers that are still not ready."""
        wait_output = self.controller.node.run(["sh", "-c", self.command], timeout_s=READY_S + 30)
        if wait_output.code == 0:
            return
        try:
            reported_by_name = parse_nodes(wait_output.stdout)
        except ValueError:  # the output is not a list of nodes
            reported_by_name = {}
        reasons_by_node = {
            worker_name: _explain_idle_worker(self.controller, worker_name, slurm_node)
            for worker_name in self.worker_names
            if (slurm_node := reported_by_name.get(worker_name, SlurmNode("not registered"))).state not in HEALTHY_STATES
        }
        if not reported_by_name:
            reasons_by_node = {
                self.controller.node.name: f"{self.controller.node.name}: Slurm does not answer: {find_error_line(wait_output)}"
            }
        raise Unanswered("; ".join(reasons_by_node.values()), reasons_by_node)


def _may_resume(site: Site, worker: Target, drained_node: SlurmNode) -> bool:
    """Whether a worker was drained by `provision`, or by Slurm for a reason that no longer holds according to its facts."""
    if drained_node.reason.startswith(SHARDLAB_REASON):
        return True
    if drained_node.user != SLURM_USER:
        return False
    slurmd_service = worker.facts[SERVICES].get("slurmd")
    if slurmd_service is None or slurmd_service.state != "active":
        return False
    if drained_node.reason.startswith(AWAY_REASONS):
        return True
    # the reason no longer holds if slurm.conf is up to date; an earlier operation restarted slurmd after slurm.conf was written
    (controller,) = site.list_with_role("controller")
    return drained_node.reason.startswith(SMALLER_REASONS) and not any(
        _file_differs(controller, path, content) for path, content in render_slurm_files(site).items()
    )


def _is_unrecoverable(slurm_node: SlurmNode) -> bool:
    """Whether waiting for a node is useless, because the node is drained or a person set it to down."""
    return slurm_node.state in DRAINED_STATES or (slurm_node.state in DOWN_STATES and slurm_node.user not in ("", SLURM_USER))


def _explain_idle_worker(controller: Target, name: str, state: SlurmNode) -> str:
    """A sentence that says why a worker gets no jobs, with the command that makes it available again. name: the worker."""
    if not state.reason:
        return f"{name}: Slurm reports the state {state.state} and gives no reason; on {name}, run: journalctl -u slurmd"
    author = "Slurm itself" if state.user == SLURM_USER else f"the user {state.user}"
    return (
        f"{name}: Slurm reports the state {state.state}; the reason, given by {author}, is: {state.reason}. The state was not "
        f"changed; when the cause is fixed, run on {controller.node.name}: sudo {_make_resume_command(name)}"
    )


def _make_resume_command(worker_name: str) -> str:
    return f"scontrol update nodename={worker_name} state=resume"


def _make_resume_script(worker_name: str) -> str:
    """A shell script that resumes a drained worker in Slurm. The script fails if the worker is still drained afterwards.

    Slurm refuses to resume a worker that is no longer drained: Slurm may have resumed the worker itself when slurmd registered,
    or slurmctld may have restarted after the state was read. In this case the script succeeds, and the next change,
    `WaitForWorkers`, checks whether the worker becomes ready.
    """
    drained_patterns = " | ".join(f"{state}*" for state in sorted(DRAINED_STATES))
    return f"""\
said=$({_make_resume_command(worker_name)} 2>&1) && exit 0
case "$(sinfo -h -N -n {worker_name} -o %t | sort -u)" in '' | {drained_patterns}) ;; *) exit 0 ;; esac
echo "$said" >&2
exit 1"""


def _started_before(target: Target, written_s: float) -> bool:
    started_s = target.facts[SERVICES]["slurmd"].since_s
    return started_s is not None and started_s < written_s


def _file_differs(target: Target, path: str, content: bytes, mode: int = 0o644, owner: str = "root:root") -> bool:
    present_file = target.facts[FILES].get(path)
    return present_file is None or not present_file.holds(content) or (present_file.mode, present_file.owner) != (mode, owner)


ACCOUNTS = Operation("slurm-accounts", plan_accounts, written_paths=(DBD_CONF,))
CONTROLLER = Operation("slurm-controller", plan_controller, written_paths=(SLURM_CONF, GRES_CONF, CGROUP_CONF))
WORKERS = Operation("slurm-workers", plan_worker, written_paths=(WORKER_OPTIONS, WORKER_UNIT))
REGISTERED = Operation("slurm-nodes", plan_nodes, once=True)
