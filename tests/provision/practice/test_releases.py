"""Practice nodes that run another release of Debian than this machine: when shardlab refuses them, and what the key `release:`
decides."""

import subprocess
import sys

import pytest
from support_practice import FILE, WHY
from support_releases import OTHERS

from provision.operations import packages
from provision.practice import base, python
from provision.practice.base import PracticeNodeError
from provision.providers import virtual
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace

# Runs a command without control groups, as on a machine that has none. It runs in its own mount namespace. The umount is lazy,
# because processes of this machine are still in these control groups.
WITHOUT = """
grep ' cgroup2 ' /proc/self/mounts | while read -r _ target _; do umount --lazy "$target"; done
exec "$@"
"""
CHECK = """
import sys
from provision.practice import base
base.check_machine()
try:
    base.check_machine(sys.argv[1])
except base.PracticeNodeError as error:
    print(error)
"""
DEBIAN = WHY is None and base.read_os_release().get("ID") == "debian"


@pytest.mark.skipif(not DEBIAN, reason=WHY or "other releases need Debian on this machine")
@pytest.mark.parametrize("release", OTHERS)
def test_without_cgroups_v2_only_the_release_of_this_machine_is_allowed(release):
    check = [sys.executable, "-P", "-c", CHECK, release]
    said = subprocess.run(check, capture_output=True, text=True, check=True).stdout
    assert said == ""
    without = ["unshare", "--mount", "sh", "-c", WITHOUT, "without", *check]
    said = subprocess.run(without, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"practice nodes of Debian {release} need control groups of version 2, without which systemd")
    assert "mount -t cgroup2" in said


def test_another_release_needs_debian_whose_archive_has_it(tmp_path):
    with pytest.raises(
        PracticeNodeError, match=r"Debian trixie need Debian on this machine, .*; this is Ubuntu 24\.04\.1 LTS\."
    ):
        base._check_other_release(
            "practice nodes of Debian trixie", os_release={"ID": "ubuntu", "PRETTY_NAME": "Ubuntu 24.04.1 LTS"}
        )


def test_each_release_has_a_base_and_an_environment_of_its_own(tmp_path):
    def of(more):
        file = tmp_path / "cluster.yaml"
        file.write_text(FILE.replace("SHARED", str(tmp_path / "shared")) + more)
        made = cluster.load_cluster(file)
        node = virtual.list_nodes(made, Workspace(tmp_path))[0]
        return base.find_base_folder(packages.ALL_PACKAGES, made.release), node.python, node.venv_python

    own = of("")
    assert own[2] == "python3"
    found = [of(f"release: {release}\n") for release in OTHERS]
    assert len({folder for folder, _, _ in [own, *found]}) == 1 + len(OTHERS)
    assert {interpreter for _, _, interpreter in found} == {python.PYTHON_INTERPRETER}
    assert all(environment not in ("", own[1]) for _, environment, _ in found)
    codename = base.read_os_release().get("VERSION_CODENAME")
    if codename in ("bookworm", "trixie", "sid"):
        assert of(f"release: {codename}\n") == own
