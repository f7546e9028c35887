"""An existing Slurm that shardlab did not set up is used without any change; anything it lacks is reported in one sentence."""

import json
import os
import subprocess

import msgspec
import pytest

from provision.fact import Unanswered
from provision.facts import slurm_here, tools
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.host import HOST
from provision.facts.services import SERVICES
from provision.facts.slurm_here import SLURM_HERE, KnownNode, SlurmHere
from provision.facts.tools import TOOLS
from provision.operation import Nothing
from provision.operations import hosts, inventory, munge, packages, slurm, slurm_files, users
from provision.operations.existing_slurm import find_existing_slurm
from shardlab.hardware import host
from tests.provision.operations.test_operations import RUNNING, site, with_files

NODES = tuple(KnownNode(name, name, f"10.0.0.{place}", "IDLE", ("batch", "all")) for place, name in enumerate(["w1", "w2"], 2))
THERE = SlurmHere("/usr/bin", True, "/etc/slurm/slurm.conf", False, True, "campus", "23.11.4", NODES, ("batch", "all"))
USES = Nothing("uses the Slurm that is there (cluster campus, version 23.11.4), which is not changed")


def with_slurm(there=THERE, *, sudo=True):
    one = site()
    for target in one.targets:
        target.facts.answers[SLURM_HERE.name] = there
        target.node.may_sudo = sudo
    return one


def test_an_existing_slurm_is_neither_installed_nor_overwritten():
    one = with_slurm()
    head, w1, _ = one.targets
    for target in (head, w1):
        assert packages.list_needed_packages(one, target) == ["chrony", "python3-venv"]
        assert users.plan_munge_user(one, target) == USES
        assert isinstance(hosts.plan(one, target), Nothing)
    for plan in (munge.plan_munge_key, slurm.plan_accounts, slurm.plan_controller):
        assert plan(one, head) == USES
    for plan in (munge.plan_munge_key_copy, slurm.plan_worker):
        assert plan(one, w1) == USES
    assert slurm.plan_nodes(one, head) == Nothing(
        "the Slurm that is there (cluster campus) knows 2 workers, in the partition batch"
    )


def test_our_own_slurm_is_kept_up_as_before_but_only_with_root():
    ours = msgspec.structs.replace(THERE, is_ours=True)
    one = with_slurm(ours)
    head = one.targets[0]
    head.facts.answers[SERVICES.name] = RUNNING
    with_files(head, dict.fromkeys(slurm_files.render_slurm_files(one), (b"old", 0o644, "root:root")))
    assert any(change.description == "write /etc/slurm/slurm.conf" for change in slurm.plan_controller(one, head))
    assert slurm.plan_controller(with_slurm(ours, sudo=False), head) == USES


def replaced(place, **changes):
    nodes = [msgspec.structs.replace(node, **changes) if number == place else node for number, node in enumerate(NODES)]
    return msgspec.structs.replace(THERE, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (
            replaced(1, name="other", hostname="other", address="192.0.2.1"),
            "w2: .* does not know this node. Tell its administrator: add the node to slurm.conf .NodeName=w2 NodeAddr=10.0.0.3",
        ),
        (replaced(1, name="node17"), "calls this node node17: write `name: node17` for it in cluster.yaml"),
        (
            replaced(0, partitions=("all",)),
            "w1: .* in all, not in batch. Tell its administrator: add w1 to the partition batch",
        ),
        (
            replaced(0, state="IDLE+DRAIN"),
            "w1: .* reports the state IDLE.DRAIN. Tell its administrator; the reason is shown by",
        ),
        (replaced(0, state="MIXED*"), "reports the state MIXED"),
        (
            msgspec.structs.replace(THERE, partitions=("gpu", "cpu")),
            "has no partition batch. It has: gpu, cpu. Set slurm.partition",
        ),
    ],
)
def test_a_lacking_existing_slurm_is_reported_with_advice_for_its_administrator(there, says):
    one = with_slurm(there)
    with pytest.raises(Unanswered, match=says):
        slurm.plan_nodes(one, one.targets[0])


def test_an_existing_slurm_may_have_node_names_that_an_installed_one_may_not():
    one = with_slurm(THERE)
    one.targets[1].node.name = "GPUC960"
    assert find_existing_slurm(one) == THERE
    for target in one.targets:
        target.facts.answers[SLURM_HERE.name] = SlurmHere()
    with pytest.raises(Unanswered, match=r"GPUC960: no Slurm is installed that uses this name\. Allowed .*small letters"):
        find_existing_slurm(one)
    one.targets[1].node.name = "w1"
    assert find_existing_slurm(one) is None


@pytest.mark.parametrize("state", ["IDLE", "MIXED", "ALLOCATED+CLOUD", "IDLE+CLOUD+POWERED_DOWN", "COMPLETING"])
def test_a_node_that_gets_jobs_is_no_fault(state):
    """`provision` accepts each of these states of a node, in which Slurm gives jobs to the node."""
    one = with_slurm(replaced(0, state=state))
    assert isinstance(slurm.plan_nodes(one, one.targets[0]), Nothing)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (
            SlurmHere("/usr/bin", True, "/etc/slurm/slurm.conf"),
            "was not written by shardlab, and Slurm's controller does not answer",
        ),
        (msgspec.structs.replace(THERE, commands="/opt/slurm/bin", is_in_path=False), "export PATH=.PATH:/opt/slurm/bin"),
    ],
)
def test_a_slurm_that_cannot_be_used_stops_before_anything_is_changed(there, says):
    one = with_slurm(there)
    for plan in (users.plan_munge_user, munge.plan_munge_key, slurm.plan_controller):
        with pytest.raises(Unanswered, match=says):
            plan(one, one.targets[0])


def test_without_root_and_slurm_missing_tools_of_packages_are_reported():
    one = with_slurm(SlurmHere(), sudo=False)
    head = one.targets[0]
    head.facts.answers[TOOLS.name] = tools.parse("python3-venv\nmunge\nsomething else\n")
    assert packages.find_missing_packages(one, head, packages.list_needed_packages(one, head)) == [
        "mariadb-server",
        "slurm-client",
        "slurmctld",
        "slurmdbd",
    ]


def test_the_inventory_says_which_slurm_and_partition_jobs_use():
    one = with_slurm()
    for target in one.targets:
        target.facts.answers |= {
            HOST.name: host.read_host(),
            ADDRESSES.name: {},
            ENVIRONMENT.name: InstalledEnvironment(source="x"),
        }
    assert json.loads(inventory.render_inventory(one))["slurm"] == {
        "cluster": "campus",
        "version": "23.11.4",
        "conf": "/etc/slurm/slurm.conf",
        "partition": "batch",
        "installed_by_shardlab": False,
    }


SCONTROL = """\
#!/bin/sh
case "$*" in
ping) echo "Slurmctld(primary) at head is UP" ;;
"show config") printf '%s\\n' 'ClusterName    = campus' 'SLURM_CONF     = FILE' 'SLURM_VERSION  = 23.11.4' ;;
"show node --oneliner")
    echo "NodeName=w1 Arch=x86_64 NodeAddr=10.0.0.2 NodeHostName=w1 State=IDLE+DRAIN ThreadsPerCore=1 Partitions=batch,all"
    echo 'NodeName=$(reboot) NodeAddr=x State=IDLE' ;;
"show partition --oneliner") echo "PartitionName=batch AllowGroups=ALL State=UP"; echo "PartitionName=all State=UP" ;;
esac
"""


@pytest.mark.parametrize("is_ours", [False, True])
def test_the_fact_about_an_existing_slurm_is_read(tmp_path, is_ours):
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{slurm_here.SHARDLAB_HEADER} for the cluster x\nClusterName=x\n" if is_ours else "ClusterName=campus\n")
    (tmp_path / "scontrol").write_text(SCONTROL.replace("FILE", str(conf)))
    (tmp_path / "scontrol").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(slurm_here.build_command(""), env=environment, capture_output=True, text=True, check=True)
    found = slurm_here.parse(done.stdout)
    assert found == SlurmHere(
        commands=str(tmp_path),
        is_in_path=True,
        conf=str(conf),
        is_ours=is_ours,
        answers=True,
        cluster="campus",
        version="23.11.4",
        nodes=(KnownNode("w1", "w1", "10.0.0.2", "IDLE+DRAIN", ("batch", "all")),),
        partitions=("batch", "all"),
    )


def test_a_machine_without_slurm_says_so_at_once(tmp_path):
    for name in ("sh", "bash", "head", "grep", "tail", "sed", "timeout", "cat", "mktemp", "rm", "tr"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(slurm_here.build_command(""), env=environment, capture_output=True, text=True, check=True)
    assert not slurm_here.parse(done.stdout).answers


def test_provision_recognizes_its_own_slurm_by_the_first_line_of_slurm_conf():
    """`provision` recognizes its own Slurm by the first line of slurm.conf, so both texts must be equal."""
    assert slurm_files.render_slurm_files(site())["/etc/slurm/slurm.conf"].decode().startswith(slurm_here.SHARDLAB_HEADER)
