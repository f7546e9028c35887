"""Slurm: first its accounts and its controller, then the workers, which ask the controller for their configuration."""

from __future__ import annotations

from provision.facts.files import FILES
from provision.facts.nodes import NODES
from provision.facts.services import SERVICES
from provision.operations import Change, Nothing, On, Operation, Run, Site, Target, Write, shell
from provision.operations.service import running
from provision.operations.slurm_files import accounts, files
from templates import render

DATABASE = "slurm_acct_db"
DBD = "/etc/slurm/slurmdbd.conf"
CONF = "/etc/slurm/slurm.conf"
WORKER_OPTIONS, WORKER_UNIT = "/etc/default/slurmd", "/etc/systemd/system/slurmd.service.d/configless.conf"
# Statements that say nothing where what they ask for is there.
SQL = (
    f"CREATE DATABASE IF NOT EXISTS {DATABASE}; CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA unix_socket; "
    f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'localhost';"
)
HEALTHY = frozenset({"idle", "alloc", "mix", "comp"})


def plan_accounts(site: Site, target: Target) -> list[Change] | Nothing:
    """MariaDB and slurmdbd on the controller. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("controller"):
        return Nothing("it keeps no accounts")
    changes = running(target, "mariadb", [])
    wanted = accounts(site)
    if _differs(target, DBD, wanted, 0o600, "slurm:slurm"):
        changes.append(shell("make the database of accounts", f'mariadb --batch -e "{SQL}"', timeout_s=120))
        # after the database: that it is there is seen by this file
        changes.append(Write(f"write {DBD}", DBD, wanted, 0o600, "slurm:slurm"))
    changes += running(target, "slurmdbd", [DBD], changed=bool(changes))
    return changes or Nothing("slurmdbd runs on MariaDB")


def plan_controller(site: Site, target: Target) -> list[Change] | Nothing:
    """slurmctld on the controller. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("controller"):
        return Nothing("it does not control")
    absent = site.absent("worker")
    if (
        absent and CONF in target.facts[FILES]
    ):  # without what it is, its line cannot be written, and without its line its jobs end
        return running(target, "slurmctld", [CONF]) or Nothing(f"slurm.conf is left as it is, without {', '.join(absent)}")
    changes: list[Change] = []
    wanted = files(site)
    for path, content in sorted(wanted.items(), key=lambda file: file[0] == CONF):  # last: where it stands, so do the others
        if _differs(target, path, content):
            changes.append(Write(f"write {path}", path, content))
    if changes:  # slurmdbd answers some seconds after it starts, and a controller that never met it does not start
        wait = (
            "for n in $(seq 60); do sacctmgr -nP show user >/dev/null 2>&1 && exit 0; sleep 0.5; done; sacctmgr -nP show user"
        )
        changes.append(shell("wait until slurmdbd answers", wait, timeout_s=60))
    changes += running(target, "slurmctld", [*wanted], changed=bool(changes))
    return changes or Nothing("slurmctld runs with the configuration as it should be")


def plan_worker(site: Site, target: Target) -> list[Change] | Nothing:
    """slurmd on a worker. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has("worker"):
        return Nothing("it does not work")
    (controller,) = site.with_role("controller")
    if controller.node.name in site.left:
        return Nothing(f"{controller.node.name}, whose configuration it is to have, cannot be asked")
    changes: list[Change] = []
    options = f'SLURMD_OPTIONS="--conf-server {controller.node.host}:6817 -N {target.node.name}"\n'.encode()
    unit = render("slurm/configless.conf.j2").encode()
    if _differs(target, WORKER_UNIT, unit):
        changes.append(Run("make room for our part of slurmd.service", ["mkdir", "-p", WORKER_UNIT.rpartition("/")[0]]))
        changes.append(Write(f"write {WORKER_UNIT}", WORKER_UNIT, unit))
        changes.append(Run("have systemd read it", ["systemctl", "daemon-reload"]))
    if _differs(target, WORKER_OPTIONS, options):
        changes.append(Write(f"write {WORKER_OPTIONS}", WORKER_OPTIONS, options))
    conf = controller.facts[FILES].get(CONF)
    changes += running(target, "slurmd", [WORKER_UNIT, WORKER_OPTIONS], changed=bool(changes))
    if not changes and conf is not None and _is_older(target, conf.written_s):
        changes.append(
            Run("start slurmd anew, as the controller's configuration has changed", ["systemctl", "restart", "slurmd"], 120)
        )
    return changes or Nothing("slurmd runs with the controller's configuration")


def plan_nodes(site: Site, target: Target) -> list[Change] | Nothing:
    """Every worker registered and ready; one that Slurm drained says why, and is left to the person. Raises Unanswered."""
    if site.cluster.slurm is None:
        return Nothing("there is no Slurm")
    (controller,) = site.with_role("controller")
    if controller.node.name in site.left:
        return Nothing("the controller cannot be asked")
    wanted = [one.node.name for one in site.with_role("worker") if one.node.name not in site.left]
    states = controller.facts[NODES]
    bad = [name for name in wanted if states.get(name, "missing").rstrip("*~#!%$@^-+") not in HEALTHY]
    if not bad:
        return Nothing(f"{len(wanted)} workers are ready")
    names = ",".join(wanted)
    wait = f"""\
for n in $(seq 120); do
    test "$(sinfo -hN -n {names} -o '%N %t' | sort -u | grep -cE ' ({"|".join(sorted(HEALTHY))})$')" = {len(wanted)} && exit 0
    sleep 0.5
done
sinfo -hN -n {names} -o '%N is %T: %E' >&2
exit 1"""
    told = ", ".join(f"{name}: {states.get(name, 'not registered')}" for name in bad)
    return [On(controller.node, shell(f"wait until all workers are ready ({told})", wait, timeout_s=90))]


def _is_older(target: Target, moment_s: float) -> bool:
    since = target.facts[SERVICES]["slurmd"].since_s
    return since is not None and since < moment_s


def _differs(target: Target, path: str, content: bytes, mode: int = 0o644, owner: str = "root:root") -> bool:
    found = target.facts[FILES].get(path)
    return found is None or not found.holds(content) or (found.mode, found.owner) != (mode, owner)


ACCOUNTS = Operation("slurm-accounts", plan_accounts)
CONTROLLER = Operation("slurm-controller", plan_controller)
WORKERS = Operation("slurm-workers", plan_worker)
REGISTERED = Operation("slurm-nodes", plan_nodes, once=True)
