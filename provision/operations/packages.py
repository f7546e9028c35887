"""Installs the Debian packages that a node needs for its roles, and first finishes an interrupted installation."""

from __future__ import annotations

from collections.abc import Sequence

from provision.existing_slurm import existing
from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.facts.tools import TOOLS
from provision.operation import Change, Nothing, Operation, Site, Target, shell

BASE = ("python3-venv", "rsync")  # rsync: `collect fetch` uses it
MUNGE = ("munge",)
CONTROLLER = ("slurmctld", "slurmdbd", "slurm-client", "mariadb-server")
WORKER = ("slurmd", "slurm-client")
CLOCK = ("chrony",)
COMPILER = ("gcc", "libc6-dev", "python3-dev")  # Triton compiles kernel launchers for torch.compile with it
NFS_SERVER, NFS_CLIENT = ("nfs-kernel-server",), ("nfs-common",)
SSH_CLIENT = ("openssh-client",)  # from Debian 14 on openssh-server no longer brings it
SITE = ("environment-modules", "charliecloud-runtime")  # not installed by provisioning: practice nodes play a managed site
ALL = tuple(sorted({*BASE, *MUNGE, *CONTROLLER, *WORKER, *CLOCK, *SSH_CLIENT, *SITE}))
LOCK_S = 600  # so long we wait for other installations, such as unattended-upgrades after the first boot
APT = f"apt-get -o DPkg::Lock::Timeout={LOCK_S} -o Dpkg::Use-Pty=0"
OPTIONS = "-qq -y --no-install-recommends"
QUIET = "export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a"


def nfs_server(site: Site) -> Target | None:
    """The node that exports the shared folder; None if no node of the cluster does, as with practice nodes."""
    if site.is_practice:
        return None
    return next((target for target in site.targets if target.node.name == site.cluster.storage.server), None)


def wanted(site: Site, target: Target) -> list[str]:
    """The packages of a node, by its roles. A container uses its host's clock, so it needs no chrony; without root, nobody
    asks which service sets the clock. Raises Unanswered."""
    names = [*BASE]
    if site.cluster.slurm is not None and existing(site) is None:
        names += [*MUNGE, *(CONTROLLER if target.has("controller") else ()), *(WORKER if target.has("worker") else ())]
    if target.node.may_sudo and not target.facts[SYSTEM].is_container:
        names += CLOCK
    if site.cluster.ssh.between_nodes:
        names += SSH_CLIENT
    has_gpus = site.cluster.gpus is not None and site.cluster.gpus.per_node > 0 and not site.is_practice
    if has_gpus and target.has("worker"):
        names += COMPILER
    if server := nfs_server(site):
        names += NFS_SERVER if server is target else NFS_CLIENT
    return sorted(set(names))


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Install what is missing. Raises Unanswered."""
    if not target.node.may_sudo:
        missing = lacking(site, target, wanted(site, target))
        return install(missing) if missing else Nothing("it has all tools that are needed")
    installed = target.facts[PACKAGES]
    missing = [name for name in wanted(site, target) if name not in installed.versions]
    changes: list[Change] = []
    if installed.interrupted:
        # where a package was not even unpacked wholly, what needs it cannot be configured before apt has had it again
        repair = f"{QUIET}; dpkg --force-confdef --force-confold --configure -a || {APT} {OPTIONS} --fix-broken install"
        changes.append(shell("finish the installation that was interrupted", repair, timeout_s=LOCK_S))
    if missing:
        changes += install(missing)
    return changes or Nothing("all packages are installed")


def lacking(site: Site, target: Target, names: Sequence[str]) -> list[str]:
    """Those of the packages that a node lacks. Without root, a tool is enough, whatever package it came from."""
    present = target.facts[PACKAGES].versions if target.node.may_sudo else target.facts[TOOLS]
    return [name for name in names if name not in present]


def install(names: Sequence[str], options: str = "") -> list[Change]:
    """The changes that install these packages. options: further options of apt-get."""
    lists = f"{QUIET}; {APT} -qq update || true"  # where no archive is reached, the cached lists serve
    words = " ".join([OPTIONS, *([options] if options else []), "install", *names])
    return [
        shell("update the package lists", lists, timeout_s=LOCK_S + 300),
        shell(f"install {', '.join(names)}", f"{QUIET}; {APT} {words}", timeout_s=LOCK_S + 1800),
    ]


INSTALL = Operation("packages", plan)
