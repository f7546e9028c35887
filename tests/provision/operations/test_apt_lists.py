"""The packages that `provision` installs are in the package lists of Debian or Ubuntu, if this machine has these lists."""

import platform
import re
import shutil
import subprocess

import pytest

from provision import gpu_generations
from provision.operations import packages, rdma

NAMES = {*packages.ALL_PACKAGES, *packages.COMPILER_PACKAGES, *packages.NFS_SERVER, *packages.NFS_CLIENT, *rdma.RDMA_PACKAGES}
DRIVER = {  # packages of NVIDIA's driver, which only Ubuntu has under these names
    name.format(gpu_generations.LONG_SUPPORT_BRANCH)
    for name in (
        "nvidia-headless-{}-server", "nvidia-headless-{}-server-open", "nvidia-utils-{}-server",
        "nvidia-compute-utils-{}-server", "nvidia-fabricmanager-{}",
    )
}  # fmt: skip


def versions(names: set[str]) -> dict[str, str]:
    """Maps each package in `names` to its newest version in apt's lists. Packages that are not in the lists are left out."""
    if shutil.which("apt-cache") is None:
        return {}
    said = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", *sorted(names)], capture_output=True, text=True, check=False
    ).stdout
    return dict(re.findall(r"^Package: (\S+)$.*?^Version: (\S+)$", said, re.MULTILINE | re.DOTALL))


def is_ubuntu() -> bool:
    return platform.freedesktop_os_release().get("ID") == "ubuntu"


@pytest.mark.skipif(not versions({"slurmctld"}), reason="needs the package lists of Debian or Ubuntu: apt-get update")
def test_each_package_is_in_the_lists_and_is_new_enough():
    wanted = NAMES | DRIVER if is_ubuntu() else NAMES
    listed = versions(wanted)
    assert wanted - listed.keys() == set()
    # Slurm 22.05 is the first version with the plugin cgroup/v2, which shardlab needs
    assert tuple(map(int, listed["slurmctld"].split(".")[:2])) >= (22, 5)
    python = re.match(r"(\d+)\.(\d+)", listed["python3-venv"])
    assert python is not None
    assert (int(python[1]), int(python[2])) >= (3, 11)
