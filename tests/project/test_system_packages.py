"""`make system` names, or installs as root, the missing packages of Debian or Ubuntu whose commands the tests need."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OS_RELEASES = {
    "debian": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\n',
    "ubuntu": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nID_LIKE=debian\n',
    "mint": 'PRETTY_NAME="Linux Mint 22"\nID=linuxmint\nID_LIKE="ubuntu debian"\n',
    "fedora": 'PRETTY_NAME="Fedora Linux 43 (Container Image)"\nID=fedora\n',
}
PACKAGES = {  # of each command that is looked for
    "chromium": "chromium",
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "ch-run": "charliecloud-runtime",
    "ip": "iproute2",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "pdflatex": "texlive-latex-recommended",
    "pdftotext": "poppler-utils",
    "zsh": "zsh",
    "fish": "fish",
    "tcsh": "tcsh",
    "ksh": "ksh",
    "sshd": "openssh-server",
    "g++": "g++",
}


class Machine:
    """A machine whose PATH has the shell's own tools, and what a test adds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for command in ("sh", "make", "sed", "tr", "test", "printf", "df", "awk"):
            (folder / command).symlink_to(shutil.which(command))

    def add(self, command: str, script: str = "exit 1") -> None:
        (self.folder / command).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / command).chmod(0o755)

    def make_system(self, os_release: str) -> str:
        (self.folder / "os-release").write_text(OS_RELEASES[os_release])
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment = {**inherited, "PATH": str(self.folder)}
        command = [self.folder / "make", "-s", "system", f"OS_RELEASE={self.folder}/os-release"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout

    def missing(self) -> list[str]:
        """The packages of commands that this machine lacks. Commands of root are there, although no user has them in PATH."""
        path = f"{self.folder}:/usr/sbin:/sbin"
        return [package for command, package in PACKAGES.items() if not shutil.which(command, path=path)]


@pytest.fixture
def machine(tmp_path):
    """A machine of an ordinary user, with zsh and g++."""
    machine = Machine(tmp_path)
    machine.add("id", "echo 1000")
    machine.add("zsh")
    machine.add("g++")
    return machine


def test_a_user_gets_one_command_with_only_the_missing_packages(machine):
    packages = machine.missing()
    assert "chromium" in packages
    assert "zsh" not in packages
    line = f"sudo apt install --no-install-recommends {' '.join(packages)}\n"
    assert machine.make_system("debian") == f"for the tests that are skipped otherwise: {line}"


def test_another_chromium_based_browser_is_accepted(machine):
    machine.add("google-chrome")
    assert "chromium" not in machine.make_system("debian")


def test_on_ubuntu_chromium_is_left_out_with_the_reason(machine):
    why, line = machine.make_system("ubuntu").splitlines()
    assert why.startswith("no chromium or google-chrome: Ubuntu has it only as a snap")
    packages = [package for package in machine.missing() if package != "chromium"]
    assert line.endswith(f"sudo apt install --no-install-recommends {' '.join(packages)}")


def test_a_system_that_resembles_debian_is_treated_so(machine):
    assert "sudo apt install" in machine.make_system("mint")


def test_any_other_system_gets_the_names_of_debian(machine):
    said = machine.make_system("fedora")
    assert said == f"missing, so that the tests that need them are skipped (Debian's names): {' '.join(machine.missing())}\n"


def test_no_line_is_printed_if_no_package_is_missing(machine):
    for command in PACKAGES:
        machine.add(command)
    assert machine.make_system("ubuntu") == ""


@pytest.mark.parametrize("os_release", ["debian", "ubuntu"])
def test_root_sees_the_list_of_packages_before_their_installation(machine, os_release):
    machine.add("id", "echo 0")
    machine.add("apt-get", 'echo "$DEBIAN_FRONTEND $*" >> "${0%/*}/asked"; echo apt was asked to $2')
    packages = [package for package in machine.missing() if (package, os_release) != ("chromium", "ubuntu")]
    said = machine.make_system(os_release)
    assert f"installing for the tests: {' '.join(packages)}\napt was asked to update\n" in said
    asked = (machine.folder / "asked").read_text().splitlines()
    assert asked[1] == f"noninteractive -qq install --no-install-recommends {' '.join(packages)}"


def test_root_without_a_network_goes_on_without_the_packages(machine):
    machine.add("id", "echo 0")
    machine.add("apt-get", "exit 100")
    assert machine.make_system("debian").endswith("they cannot be installed, so the tests that need them are skipped\n")


def test_the_makefile_names_a_package_for_each_command():
    lines = re.findall(r"^TOOLS \+?:?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pairs = dict(word.split(":") for line in lines for word in line.split())
    assert {command.split("/")[0]: package for command, package in pairs.items()} == PACKAGES
