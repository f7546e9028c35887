"""Installs the Debian packages that a node needs for its roles. First finishes an installation that was interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.facts.tools import TOOLS
from provision.operation import Change, Nothing, Operation, Site, Target, shell_change
from provision.operations.existing_slurm import find_existing_slurm

BASE_PACKAGES = ("python3-venv",)
MUNGE_PACKAGES = ("munge",)
CONTROLLER_PACKAGES = ("slurmctld", "slurmdbd", "slurm-client", "mariadb-server")
WORKER_PACKAGES = ("slurmd", "slurm-client")
CLOCK_PACKAGES = ("chrony",)
COMPILER_PACKAGES = ("gcc", "libc6-dev", "python3-dev")  # Triton needs the compiler to build kernel launchers for torch.compile
NFS_SERVER, NFS_CLIENT = ("nfs-kernel-server",), ("nfs-common",)
SSH_CLIENT = ("openssh-client",)  # in Debian 14 and newer, openssh-server does not install the client
# only practice nodes need these packages, to act as a Slurm site
SITE_PACKAGES = ("environment-modules", "charliecloud-runtime")
ALL_PACKAGES = tuple(
    sorted(
        {*BASE_PACKAGES, *MUNGE_PACKAGES, *CONTROLLER_PACKAGES, *WORKER_PACKAGES, *CLOCK_PACKAGES, *SSH_CLIENT, *SITE_PACKAGES}
    )
)
LOCK_S = 600  # the most seconds to wait for other installations, such as unattended-upgrades after the first boot
APT_COMMAND = f"apt-get -o DPkg::Lock::Timeout={LOCK_S} -o Dpkg::Use-Pty=0"
INSTALL_OPTIONS = "-qq -y --no-install-recommends"
QUIET_VARIABLES = "export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a"


def find_nfs_server(site: Site) -> Target | None:
    """The node that exports the shared folder; None if no node exports it, as in a cluster of practice nodes."""
    if site.is_practice:
        return None
    return next((target for target in site.targets if target.node.name == site.cluster.storage.server), None)


def list_needed_packages(site: Site, target: Target) -> list[str]:
    """The packages that a node needs for its roles. Raises Unanswered.

    A container needs no chrony, because it uses the clock of its host. Without root, the service of the clock is not examined.
    """
    package_names = [*BASE_PACKAGES]
    if site.cluster.slurm is not None and find_existing_slurm(site) is None:
        package_names += [
            *MUNGE_PACKAGES,
            *(CONTROLLER_PACKAGES if target.has_role("controller") else ()),
            *(WORKER_PACKAGES if target.has_role("worker") else ()),
        ]
    if target.node.may_sudo and not target.facts[SYSTEM].is_container:
        package_names += CLOCK_PACKAGES
    if site.cluster.ssh.between_nodes:
        package_names += SSH_CLIENT
    has_gpus = site.cluster.gpus is not None and site.cluster.gpus.per_node > 0 and not site.is_practice
    if has_gpus and target.has_role("worker"):
        package_names += COMPILER_PACKAGES
    if server := find_nfs_server(site):
        package_names += NFS_SERVER if server is target else NFS_CLIENT
    return sorted(set(package_names))


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Install the missing packages of a node. Raises Unanswered."""
    if not target.node.may_sudo:
        missing_packages = find_missing_packages(site, target, list_needed_packages(site, target))
        return make_install_changes(missing_packages) if missing_packages else Nothing("it has all tools that are needed")
    installed_packages = target.facts[PACKAGES]
    missing_packages = [name for name in list_needed_packages(site, target) if name not in installed_packages.versions]
    changes: list[Change] = []
    if installed_packages.interrupted:
        # If a package was only partly unpacked, dpkg cannot configure the packages that depend on it. Then apt repairs it.
        configure_command = "dpkg --force-confdef --force-confold --configure -a"
        repair_script = f"{QUIET_VARIABLES}; {configure_command} || {APT_COMMAND} {INSTALL_OPTIONS} --fix-broken install"
        changes.append(shell_change("finish the installation that was interrupted", repair_script, timeout_s=LOCK_S))
    if missing_packages:
        changes += make_install_changes(missing_packages)
    return changes or Nothing("all packages are installed")


def find_missing_packages(site: Site, target: Target, package_names: Sequence[str]) -> list[str]:
    """The names of the packages that a node lacks. On a node without root, a package is not lacking if the node has its tool
    from any source."""
    installed_names = target.facts[PACKAGES].versions if target.node.may_sudo else target.facts[TOOLS]
    return [package_name for package_name in package_names if package_name not in installed_names]


def make_install_changes(package_names: Sequence[str], apt_options: str = "") -> list[Change]:
    """The changes that install these packages. apt_options: further options of apt-get."""
    lists = f"{QUIET_VARIABLES}; {APT_COMMAND} -qq update || true"  # if no archive can be reached, the cached lists are used
    install_words = " ".join([INSTALL_OPTIONS, *([apt_options] if apt_options else []), "install", *package_names])
    return [
        shell_change("update the package lists", lists, timeout_s=LOCK_S + 300),
        shell_change(
            f"install {', '.join(package_names)}", f"{QUIET_VARIABLES}; {APT_COMMAND} {install_words}", timeout_s=LOCK_S + 1800
        ),
    ]


INSTALL = Operation("packages", plan)
