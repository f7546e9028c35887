"""Makes what all practice nodes share: a base for each release of Debian, and the folder of wheels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from provision import software
from provision.practice import base, python
from provision.practice.base import SYSTEM, UID, USER, run
from shardlab.files import files

SOURCES = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/keyrings", "usr/share/keyrings")
MODULES = "environment-modules"  # the package by which nodes of another release load this machine's Python as a module
# Package lists of Debian sid expire after days. For a rehearsal, expired lists of a mirror that is not updated are good enough.
STALE = "-o Acquire::Check-Valid-Until=false"


def make_base(packages: Sequence[str], release: str | None, tell: Callable[[str], None]) -> Path:
    """Make the base if it does not exist, and return its folder. The caller holds the lock of `base.alone`. Raises NoBase.

    packages: the packages that are downloaded into the apt cache of the base. release: the codename of a release of Debian;
    None: the release of this machine. tell: is called with a sentence about work that takes minutes. If the process is killed
    before the base is complete, the next call starts again.
    """
    base.check(release)
    made = base.folder(packages, release)
    if made.is_dir():
        return made
    files.make_folder(made.parent)
    for left in made.parent.glob(f".{made.name}.*"):  # folders that killed processes left
        shutil.rmtree(left, ignore_errors=True)
    growing = made.with_name(f".{made.name}.{os.getpid()}")
    try:
        tell(f"making the base of practice nodes, which is needed only once: {made}")
        is_other, mirror = base.is_other(release), base.mirror()
        system = ",".join([*SYSTEM, *([MODULES] if is_other else [])])
        codename = release or base.own_release()
        run(["debootstrap", "--variant=minbase", f"--include={system}", codename, str(growing), mirror])
        _share_resolver(growing)
        if is_other:
            (growing / "etc/apt/sources.list").write_text(f"deb {mirror} {codename} main\n")
        else:
            _share_apt(growing)
        tell("downloading the packages that nodes will install")
        _within(growing, f"apt-get {STALE if is_other else ''} update -qq")
        wanted = " ".join(sorted(packages))
        _within(growing, f"DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -d --no-install-recommends {wanted}")
        _settle(growing)
        if is_other:
            python.offer(growing)
        growing.rename(made)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return made


def make_wheels(tell: Callable[[str], None]) -> Path:
    """Download the wheels if their folder does not exist, and return the folder. Raises NoBase.

    Practice nodes install packages from this folder without a network. tell: is called with a sentence before the download.
    """
    made = base.wheels_folder()
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


def _share_apt(root: Path) -> None:
    """Copy the apt sources and keys of this machine into the base. root: the folder of the base."""
    for name in SOURCES:
        source, target = Path("/") / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy(source, target)


def _share_resolver(root: Path) -> None:
    """Copy the resolver configuration of this machine into the base, for the downloads there. root: the folder of the base."""
    resolver = root / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_bytes(Path("/etc/resolv.conf").read_bytes())


def _settle(root: Path) -> None:
    """Set up the base: a user who may use sudo, no host keys and no machine id, and an sshd that accepts only keys."""
    _within(root, f"useradd --create-home --shell /bin/bash --uid {UID} {USER} && usermod -p '*' {USER}")
    (root / "etc/sudoers.d").mkdir(exist_ok=True)
    rule = root / f"etc/sudoers.d/{USER}"
    rule.write_text(f"{USER} ALL=(ALL) NOPASSWD:ALL\n")
    rule.chmod(0o440)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    settings = root / "etc/ssh/sshd_config.d/practice.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("PasswordAuthentication no\nUseDNS no\n")
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    network = wants / "systemd-networkd.service"
    if not network.is_symlink():
        network.symlink_to("/lib/systemd/system/systemd-networkd.service")


def _within(root: Path, script: str) -> str:
    return run(["chroot", str(root), "sh", "-c", script])
