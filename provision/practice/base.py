"""What all practice nodes have in common, made once and cached: their base, and the wheels of their Python packages.

The base is the file system of a small Debian, which is never booted itself. Its apt cache holds the packages that provisioning
installs, so that a node installs them without a network.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from provision import software
from shardlab import files
from shardlab.errors import ShardlabError

USER = "practice"  # may sudo without a password, as the users of CloudLab's images may
UID = 65888  # of no user of this machine: who has a node's number there could change what belongs to its user, and become root
SYSTEM = (
    "systemd", "systemd-sysv", "dbus", "openssh-server", "sudo", "iproute2", "python3-minimal", "ca-certificates", "procps",
    "ethtool", "udev", "rsync",
)  # fmt: skip
NEEDED = ("systemd-nspawn", "debootstrap", "ip", "tc", "ssh-keygen")
RECIPE = 2  # counts up where this file makes another base of the same words
LIMIT_S = 1800
SOURCES = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/keyrings", "usr/share/keyrings")


class NoBase(ShardlabError):
    """Practice nodes are not possible on this machine, and why."""


def folder(packages: Sequence[str]) -> Path:
    """The folder of the base with these packages, which may not exist yet, below the user's cache folder."""
    words = [str(RECIPE), release()["VERSION_CODENAME"], platform.machine(), *SYSTEM, *sorted(packages)]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
    return cache() / f"base-{digest}"


def cache() -> Path:
    """The folder of what is made once for all clusters of practice nodes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardlab" / "practice"


def alone() -> AbstractContextManager[int]:
    """Hold the lock for making and removing what all practice nodes share. It is in the cache folder, which stays."""
    return files.locked(cache() / "lock")


def release() -> dict[str, str]:
    """/etc/os-release of this machine."""
    lines = Path("/etc/os-release").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name: value.strip('"') for name, value in pairs}


def check() -> None:
    """Raises NoBase if practice nodes are not possible on this machine."""
    if os.geteuid() != 0:
        raise NoBase("practice nodes need root on this machine: sudo provision ...")
    if release().get("ID") not in ("debian", "ubuntu"):
        raise NoBase(f"practice nodes need Debian or Ubuntu; this is {release().get('PRETTY_NAME', 'another system')}.")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise NoBase(
            f"practice nodes need {', '.join(missing)}: apt-get install --no-install-recommends systemd-container debootstrap "
            "iproute2 openssh-client"
        )


def make(packages: Sequence[str], tell: Callable[[str], None]) -> Path:
    """The base, which is made if it does not exist; the caller holds the lock of `alone`. If a process is killed before the
    base is complete, the next call starts again.

    Raises NoBase.
    """
    check()
    made = folder(packages)
    if made.is_dir():
        return made
    files.make_folder(made.parent)
    for left in made.parent.glob(f".{made.name}.*"):  # of a process that was killed: who makes it holds the lock
        shutil.rmtree(left, ignore_errors=True)
    growing = made.with_name(f".{made.name}.{os.getpid()}")
    try:
        tell(f"making the base of practice nodes, which is needed only once: {made}")
        codename = release()["VERSION_CODENAME"]
        run(["debootstrap", "--variant=minbase", f"--include={','.join(SYSTEM)}", codename, str(growing), mirror()])
        _share_apt(growing)
        tell("downloading the packages that nodes will install")
        _within(growing, "apt-get update -qq")
        wanted = " ".join(sorted(packages))
        _within(growing, f"DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -d --no-install-recommends {wanted}")
        _settle(growing)
        growing.rename(made)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return made


def wheels_folder() -> Path:
    """The folder of the wheels that nodes install, one for each set of packages and release of Python; it may not exist yet."""
    return cache() / f"wheels-{software.digest()}-{sys.version_info.major}.{sys.version_info.minor}"


def make_wheels(tell: Callable[[str], None]) -> Path:
    """The folder of wheels, which is filled by downloads if it does not exist; nodes install from it without a network.

    Raises NoBase.
    """
    made = wheels_folder()
    if made.is_dir():
        return made
    files.make_folder(made.parent)
    growing = made.with_name(f".{made.name}.{os.getpid()}")
    try:
        tell(f"downloading the Python packages of nodes, which is needed only once: {made}")
        growing.mkdir()
        constraints = growing / "constraints.txt"
        constraints.write_bytes(software.constraints())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--wheel-dir", str(growing)]
        run([*pip, "--constraint", str(constraints), *software.requirements()])
        growing.rename(made)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return made


def mirror() -> str:
    """The first archive that this machine's own apt asks for its release. Raises NoBase where there is none."""
    codename = release()["VERSION_CODENAME"]
    answer = run(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(REPO_URI)"])
    for line in answer.splitlines():
        made_by, suite, uri = line.split(" ", 2)
        if made_by == "Packages" and suite == codename:
            return uri
    raise NoBase(f"the apt sources of this machine name no archive of {codename}, which practice nodes need.")


def _share_apt(base: Path) -> None:
    """Copy the apt sources and keys of this machine, and its resolver for the downloads."""
    for name in SOURCES:
        source, target = Path("/") / name, base / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy(source, target)
    resolver = base / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_bytes(Path("/etc/resolv.conf").read_bytes())


def _settle(base: Path) -> None:
    """What every node has in common: a user who may sudo, no identity of its own, an sshd that takes keys alone."""
    _within(base, f"useradd --create-home --shell /bin/bash --uid {UID} {USER} && usermod -p '*' {USER}")
    (base / "etc/sudoers.d").mkdir(exist_ok=True)
    rule = base / f"etc/sudoers.d/{USER}"
    rule.write_text(f"{USER} ALL=(ALL) NOPASSWD:ALL\n")
    rule.chmod(0o440)
    for key in (base / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (base / "etc/machine-id").write_text("")
    settings = base / "etc/ssh/sshd_config.d/practice.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("PasswordAuthentication no\nUseDNS no\n")
    wants = base / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    network = wants / "systemd-networkd.service"
    if not network.is_symlink():
        network.symlink_to("/lib/systemd/system/systemd-networkd.service")


def _within(base: Path, script: str) -> str:
    return run(["chroot", str(base), "sh", "-c", script])


def run(argv: Sequence[str]) -> str:
    """Raises NoBase with the last thing that a failed command said."""
    environment = {**os.environ, "LC_ALL": "C"}
    answer = subprocess.run(
        argv, check=False, capture_output=True, text=True, env=environment, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    if answer.returncode:
        said = [line for line in (answer.stderr + answer.stdout).splitlines() if line.strip()]
        raise NoBase(f"{argv[0]} failed: {said[-1] if said else f'exit status {answer.returncode}'}")
    return answer.stdout
