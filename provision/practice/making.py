"""Makes what all practice nodes share: a base for each release of Debian, and the folder of wheels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from provision import software
from provision.practice import base, python
from provision.practice.base import SYSTEM_PACKAGES, UID, USER, run
from shardlab.files import files

SOURCES = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/keyrings", "usr/share/keyrings")
MODULES = "environment-modules"  # the package by which nodes of another release load this machine's Python as a module
# Package lists of Debian sid expire after days. For a rehearsal, expired lists of a mirror that is not updated are good enough.
STALE = "-o Acquire::Check-Valid-Until=false"


def make_base(packages: Sequence[str], release: str | None, tell: Callable[[str], None]) -> Path:
    """Make the base if it is missing, and return its folder. The caller holds the lock of `base.hold_practice_lock`.

    packages: the packages that are downloaded into the apt cache of the base. release: the codename of a release of Debian;
    None: the release of this machine. tell: is called with a sentence about work that takes minutes. If the process is killed
    before the base is complete, the next call starts again. Raises PracticeNodeError.
    """
    base.check_machine(release)
    target_folder = base.base_folder(packages, release)
    if target_folder.is_dir():
        return target_folder
    files.make_folder(target_folder.parent)
    for leftover in target_folder.parent.glob(f".{target_folder.name}.*"):  # folders that killed processes left
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = target_folder.with_name(f".{target_folder.name}.{os.getpid()}")
    try:
        tell(f"making the base of practice nodes, which is needed only once: {target_folder}")
        is_other_release, mirror = base.is_other_release(release), base.find_mirror()
        system = ",".join([*SYSTEM_PACKAGES, *([MODULES] if is_other_release else [])])
        codename = release or base.own_release()
        run(["debootstrap", "--variant=minbase", f"--include={system}", codename, str(unfinished), mirror])
        _copy_resolver(unfinished)
        if is_other_release:
            (unfinished / "etc/apt/sources.list").write_text(f"deb {mirror} {codename} main\n")
        else:
            _copy_apt_sources(unfinished)
        tell("downloading the packages that nodes will install")
        _run_in_base(unfinished, f"apt-get {STALE if is_other_release else ''} update -qq")
        names = " ".join(sorted(packages))
        _run_in_base(unfinished, f"DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -d --no-install-recommends {names}")
        _set_up_base(unfinished)
        if is_other_release:
            python.offer_python(unfinished)
        unfinished.rename(target_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target_folder


def make_wheels(tell: Callable[[str], None]) -> Path:
    """Download the wheels if their folder does not exist, and return the folder. Raises PracticeNodeError.

    Practice nodes install packages from this folder without a network. tell: is called with a sentence before the download.
    """
    target_folder = base.wheels_folder()
    if target_folder.is_dir():
        return target_folder
    files.make_folder(target_folder.parent)
    unfinished = target_folder.with_name(f".{target_folder.name}.{os.getpid()}")
    try:
        tell(f"downloading the Python packages of nodes, which is needed only once: {target_folder}")
        unfinished.mkdir()
        constraints = unfinished / "constraints.txt"
        constraints.write_bytes(software.read_constraints())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--wheel-dir", str(unfinished)]
        run([*pip, "--constraint", str(constraints), *software.required_packages()])
        unfinished.rename(target_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target_folder


def _copy_apt_sources(root: Path) -> None:
    """Copy the apt sources and keys of this machine into the base. root: the folder of the base."""
    for name in SOURCES:
        source, target = Path("/") / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy(source, target)


def _copy_resolver(root: Path) -> None:
    """Copy the resolver configuration of this machine into the base, for the downloads there. root: the folder of the base."""
    resolver = root / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_bytes(Path("/etc/resolv.conf").read_bytes())


def _set_up_base(root: Path) -> None:
    """Set up the base: a user who may use sudo, no host keys and no machine id, and an sshd that accepts only keys."""
    _run_in_base(root, f"useradd --create-home --shell /bin/bash --uid {UID} {USER} && usermod -p '*' {USER}")
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
    wanted_units = root / "etc/systemd/system/multi-user.target.wants"
    wanted_units.mkdir(parents=True, exist_ok=True)
    network = wanted_units / "systemd-networkd.service"
    if not network.is_symlink():
        network.symlink_to("/lib/systemd/system/systemd-networkd.service")


def _run_in_base(root: Path, script: str) -> str:
    return run(["chroot", str(root), "sh", "-c", script])
