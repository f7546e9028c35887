"""Makes what all practice nodes share: a base for each release of Debian, and the folder of wheels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from provision import software
from provision.practice import base, python
from provision.practice.base import PRACTICE_UID, PRACTICE_USER, SYSTEM_PACKAGES, run_here
from shardlab.files import files

APT_SOURCE_PATHS = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/keyrings", "usr/share/keyrings")
MODULES_PACKAGE = "environment-modules"  # the package by which nodes of another release load this machine's Python as a module
# Package lists of Debian sid expire after days. For a rehearsal, expired lists of a mirror that is not updated are good enough.
STALE_ARCHIVE_OPTION = "-o Acquire::Check-Valid-Until=false"


def make_base_system(packages: Sequence[str], release: str | None, print_remark: Callable[[str], None]) -> Path:
    """Make the base if it is missing, and return its folder. The caller holds the lock of `base.hold_practice_lock`.

    packages: the packages that are downloaded into the apt cache of the base. release: the codename of a release of Debian;
    None: the release of this machine. print_remark: is called with a sentence about work that takes minutes. If the process is
    killed before the base is complete, the next call starts again. Raises PracticeNodeError."""
    base.check_machine(release)
    target_folder = base.find_base_folder(packages, release)
    if target_folder.is_dir():
        return target_folder
    files.make_folder(target_folder.parent)
    for leftover_folder in target_folder.parent.glob(f".{target_folder.name}.*"):  # folders that killed processes left
        shutil.rmtree(leftover_folder, ignore_errors=True)
    unfinished_folder = target_folder.with_name(f".{target_folder.name}.{os.getpid()}")
    try:
        print_remark(f"making the base of practice nodes, which is needed only once: {target_folder}")
        is_other_release, mirror = base.is_other_release(release), base.find_mirror()
        system_packages = ",".join([*SYSTEM_PACKAGES, *([MODULES_PACKAGE] if is_other_release else [])])
        codename = release or base.read_own_release()
        run_here(["debootstrap", "--variant=minbase", f"--include={system_packages}", codename, str(unfinished_folder), mirror])
        _copy_resolver(unfinished_folder)
        if is_other_release:
            (unfinished_folder / "etc/apt/sources.list").write_text(f"deb {mirror} {codename} main\n")
        else:
            _copy_apt_sources(unfinished_folder)
        print_remark("downloading the packages that nodes will install")
        _run_in_base(unfinished_folder, f"apt-get {STALE_ARCHIVE_OPTION if is_other_release else ''} update -qq")
        package_names = " ".join(sorted(packages))
        _run_in_base(
            unfinished_folder,
            f"DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -d --no-install-recommends {package_names}",
        )
        _set_up_base(unfinished_folder)
        if is_other_release:
            python.offer_python(unfinished_folder)
        unfinished_folder.rename(target_folder)
    finally:
        shutil.rmtree(unfinished_folder, ignore_errors=True)
    return target_folder


def make_wheels(print_remark: Callable[[str], None]) -> Path:
    """Download the wheels if their folder does not exist, and return the folder. Raises PracticeNodeError.

    Practice nodes install packages from this folder without a network. print_remark: is called with a sentence before the
    download."""
    target_folder = base.find_wheels_folder()
    if target_folder.is_dir():
        return target_folder
    files.make_folder(target_folder.parent)
    unfinished_folder = target_folder.with_name(f".{target_folder.name}.{os.getpid()}")
    try:
        print_remark(f"downloading the Python packages of nodes, which is needed only once: {target_folder}")
        unfinished_folder.mkdir()
        constraints_path = unfinished_folder / "constraints.txt"
        constraints_path.write_bytes(software.read_constraints())
        pip_words = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--quiet",
            "--wheel-dir",
            str(unfinished_folder),
        ]
        run_here([*pip_words, "--constraint", str(constraints_path), *software.list_required_packages()])
        unfinished_folder.rename(target_folder)
    finally:
        shutil.rmtree(unfinished_folder, ignore_errors=True)
    return target_folder


def _copy_apt_sources(base_folder: Path) -> None:
    """Copy the apt sources and keys of this machine into the base. base_folder: the folder of the base."""
    for relative_path in APT_SOURCE_PATHS:
        source_path, target_path = Path("/") / relative_path, base_folder / relative_path
        if source_path.is_dir():
            shutil.copytree(source_path, target_path, dirs_exist_ok=True)
        elif source_path.is_file():
            shutil.copy(source_path, target_path)


def _copy_resolver(base_folder: Path) -> None:
    """Copy the resolver configuration of this machine into the base, for the downloads there. base_folder: the folder of the
    base."""
    resolver_path = base_folder / "etc/resolv.conf"
    resolver_path.unlink(missing_ok=True)
    resolver_path.write_bytes(Path("/etc/resolv.conf").read_bytes())


def _set_up_base(base_folder: Path) -> None:
    """Set up the base: a user who may use sudo, no host keys and no machine id, and an sshd that accepts only keys."""
    _run_in_base(
        base_folder,
        f"useradd --create-home --shell /bin/bash --uid {PRACTICE_UID} {PRACTICE_USER} && usermod -p '*' {PRACTICE_USER}",
    )
    (base_folder / "etc/sudoers.d").mkdir(exist_ok=True)
    sudo_rule_path = base_folder / f"etc/sudoers.d/{PRACTICE_USER}"
    sudo_rule_path.write_text(f"{PRACTICE_USER} ALL=(ALL) NOPASSWD:ALL\n")
    sudo_rule_path.chmod(0o440)
    for host_key in (base_folder / "etc/ssh").glob("ssh_host_*"):
        host_key.unlink()
    (base_folder / "etc/machine-id").write_text("")
    sshd_settings_path = base_folder / "etc/ssh/sshd_config.d/practice.conf"
    sshd_settings_path.parent.mkdir(parents=True, exist_ok=True)
    sshd_settings_path.write_text("PasswordAuthentication no\nUseDNS no\n")
    wanted_units = base_folder / "etc/systemd/system/multi-user.target.wants"
    wanted_units.mkdir(parents=True, exist_ok=True)
    network_unit = wanted_units / "systemd-networkd.service"
    if not network_unit.is_symlink():
        network_unit.symlink_to("/lib/systemd/system/systemd-networkd.service")


def _run_in_base(base_folder: Path, script: str) -> str:
    return run_here(["chroot", str(base_folder), "sh", "-c", script])
