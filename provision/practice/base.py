"""The base of practice nodes and their folder of wheels, and a check whether this machine can have practice nodes.

The base is the file system of a small Debian that all nodes share; only the nodes are booted, never the base itself. Its apt
cache contains the packages that `provision` installs, so that a node can install them without a network.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from provision import software
from shardlab.errors import ShardlabError
from shardlab.files import files, own_folder

PRACTICE_USER = "practice"  # the user of practice nodes, who may use sudo without a password, as in CloudLab's images
# The UID of PRACTICE_USER; a user of this machine with the same UID could change files of a node and become root
PRACTICE_UID = 65888
SYSTEM_PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "openssh-server", "sudo", "iproute2", "python3-minimal", "ca-certificates", "procps",
    "ethtool", "udev",
)  # fmt: skip
NEEDED_COMMANDS = ("systemd-nspawn", "debootstrap", "ip", "tc", "ssh-keygen")
RECIPE_VERSION = 2  # must be increased if making.py makes another base from the same packages and Debian release
LIMIT_S = 1800


class PracticeNodeError(ShardlabError):
    """Raised if practice nodes are not possible on this machine, or if work on them failed. The message says why."""


def find_base_folder(packages: Sequence[str], release: str | None = None) -> Path:
    """The folder of the base with these packages, below the user's cache folder. The folder may not exist yet.

    release: the codename of a release of Debian; None: the release of this machine.
    """
    digest_words = [str(RECIPE_VERSION), release or read_own_release(), platform.machine(), *SYSTEM_PACKAGES, *sorted(packages)]
    if is_other_release(release):  # the base of another Debian release contains libraries of this machine's Python
        digest_words += [sys.version, sys.base_prefix]
    base_digest = hashlib.sha256("\n".join(digest_words).encode()).hexdigest()[:12]
    return find_practice_cache() / f"base-{base_digest}"


def find_practice_cache() -> Path:
    """The folder in the user's cache for files that all clusters of practice nodes share."""
    return own_folder.make_cache_path("practice")


def hold_practice_lock() -> AbstractContextManager[int]:
    """A context manager that holds the lock for making and removing what all practice nodes share, such as the base."""
    return files.hold_lock(find_practice_cache() / "lock")


def read_own_release() -> str:
    """The codename of the release of Debian or Ubuntu on this machine, such as bookworm."""
    return read_os_release()["VERSION_CODENAME"]


def is_other_release(release: str | None) -> bool:
    """Whether a release of Debian, given by its codename, differs from the release of this machine; False for None."""
    return release is not None and release != read_os_release().get("VERSION_CODENAME")


def read_os_release() -> dict[str, str]:
    """The variables in /etc/os-release of this machine."""
    file_lines = Path("/etc/os-release").read_text().splitlines()
    name_value_pairs = (line.split("=", 1) for line in file_lines if "=" in line)
    return {variable: variable_value.strip('"') for variable, variable_value in name_value_pairs}


def check_machine(release: str | None = None) -> None:
    """Check that this machine can have practice nodes with a release of Debian. Raises PracticeNodeError if it cannot.

    release: the codename; None: the release of this machine.
    """
    if os.geteuid() != 0:
        raise PracticeNodeError("practice nodes need root on this machine: sudo provision ...")
    if read_os_release().get("ID") not in ("debian", "ubuntu"):
        raise PracticeNodeError(
            f"practice nodes need Debian or Ubuntu; this is {read_os_release().get('PRETTY_NAME', 'another system')}."
        )
    missing_commands = [command_name for command_name in NEEDED_COMMANDS if shutil.which(command_name) is None]
    if missing_commands:
        raise PracticeNodeError(
            f"practice nodes need {', '.join(missing_commands)}: apt-get install --no-install-recommends systemd-container "
            "debootstrap iproute2 openssh-client"
        )
    if is_other_release(release):
        _check_other_release(f"practice nodes of Debian {release}", os_release=read_os_release())


def _check_other_release(subject: str, os_release: dict[str, str]) -> None:
    """Check that this machine can boot nodes of another Debian release than its own. Raises PracticeNodeError if it cannot.

    subject: the subject of the error message. os_release: /etc/os-release of this machine.
    """
    if os_release.get("ID") != "debian":
        raise PracticeNodeError(
            f"{subject} need Debian on this machine, whose apt sources name the archive; this is {os_release['PRETTY_NAME']}."
        )
    if not any(mount_line.split(" ")[2] == "cgroup2" for mount_line in Path("/proc/self/mounts").read_text().splitlines()):
        raise PracticeNodeError(
            f"{subject} need control groups of version 2, without which systemd from version 258 on refuses to start; this "
            "machine has not mounted them: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified"
        )


def find_wheels_folder() -> Path:
    """The folder with the wheels that practice nodes install, for this set of packages and this version of Python. The folder
    may not exist yet."""
    return (
        find_practice_cache() / f"wheels-{software.compute_packages_digest()}-{sys.version_info.major}.{sys.version_info.minor}"
    )


def find_mirror() -> str:
    """The URL of the first package archive that apt on this machine uses for its Debian release. Raises PracticeNodeError if
    apt uses none."""
    codename = read_own_release()
    index_targets = run_here(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(REPO_URI)"])
    for index_line in index_targets.splitlines():
        index_kind, suite, archive_url = index_line.split(" ", 2)
        if index_kind == "Packages" and suite == codename:
            return archive_url
    raise PracticeNodeError(f"the apt sources of this machine name no archive of {codename}, which practice nodes need.")


def run_here(command_words: Sequence[str]) -> str:
    """Run a command on this machine and return its output. If it fails, raises PracticeNodeError with its last error line."""
    variables = {**os.environ, "LC_ALL": "C"}
    finished_process = subprocess.run(
        command_words, check=False, capture_output=True, text=True, env=variables, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    if finished_process.returncode:
        error_lines = [line for line in (finished_process.stderr + finished_process.stdout).splitlines() if line.strip()]
        raise PracticeNodeError(
            f"{command_words[0]} failed: {error_lines[-1] if error_lines else f'exit status {finished_process.returncode}'}"
        )
    return finished_process.stdout
