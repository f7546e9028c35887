"""Nodes of an experiment: their disk at /mydata, their two networks, and a check that training avoids the control network."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
from support_aside import why_not
from support_cloudlab import lan, manifest, node

from provision import order
from provision.checks import experiment_network, network
from provision.cloudlab import experiment_interfaces
from provision.fact import FactAnswers, Unanswered
from provision.facts import addresses, mkextrafs
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.files import FILES
from provision.facts.host import HOST
from provision.facts.mounts import Mount, MountPlace
from provision.facts.packages import PACKAGES, Packages
from provision.facts.rdma import RDMA, RdmaLink
from provision.facts.room import FreeSpace
from provision.facts.services import SERVICES
from provision.facts.slurm_here import SLURM_HERE, SlurmHere
from provision.facts.system import SYSTEM
from provision.facts.torch import TORCH, Torch
from provision.operation import Nothing, Site, Target
from provision.operations import extra_disks, fstab, inventory, nfs, packages, space, workspaces
from provision.provider import find_provider
from shardlab.cluster import cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.hardware import host
from shardlab.hardware.host import Nic
from shardlab.remote import remote_workspace
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace
from tests.provision.operations.test_operations import A_MACHINE, commands

STORAGE = "storage: {shared: /mydata/shardlab, server: gpu0}\n"
MOUNTED = MountPlace(mount=Mount("/dev/nvme0n1p4", "ext4", ("rw",)), empty=False)
# The interfaces of gpu0 in the manifests of support_cloudlab.
NICS = [Nic("eno1", "physical", mac="aa:00:00:00:00:01"), Nic("ens5f0", "physical", mac="0a:0b:0c:0d:00:01")]
GOOD = {"eno1": ["192.0.2.2"], "ens5f0": ["10.10.1.2"]}


def site(tmp_path, more: str = STORAGE, *, nodes: int = 2) -> Site:
    """An experiment, as its cluster file and its manifest describe it. No node has been contacted yet."""
    names = [f"gpu{place}" for place in range(nodes)]
    (tmp_path / "m.xml").write_text(manifest(*(node(name, at) for at, name in enumerate(names, 1)), lan(names)))
    file = tmp_path / "cluster.yaml"
    file.write_text(f"schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {{manifest: m.xml}}\nssh: {{user: alice}}\n{more}")
    made, workspace = cluster.load_cluster(file), Workspace(tmp_path)
    entries = {entry.name: entry for entry in made.nodes}
    targets = [Target(one, FactAnswers(one), entries[one.name]) for one in find_provider("cloudlab").nodes(made, workspace)]
    return Site(made, workspace, targets)


def test_without_slurm_and_without_a_shared_folder_each_node_has_its_part_of_a_run(tmp_path):
    one = site(tmp_path, "")
    assert one.cluster.has_separate_folders
    folder = str(one.cluster.workspaces)
    assert folder == "/opt/shardlab/workspaces"  # workspaces are not in a home folder, because home folders are on NFS
    one.targets[1].facts.answers |= {f"place {folder}": MountPlace(there=False), SYSTEM.name: A_MACHINE}
    assert commands(workspaces.plan(one, one.targets[1]))[-1] == f"install -d -o alice -- {folder}"
    entry = {"name": "gpu0", "host": "192.0.2.1", "roles": ["controller"], "python": "/opt/bin/python"}
    one.workspace.shardlab_folder.mkdir()
    (one.workspace.shardlab_folder / "inventory.json").write_text(
        json.dumps({"schema": 1, "cluster": "bench", "nodes": [entry]})
    )
    assert remote_workspace.find_remote_workspace(one.workspace, one.cluster).workspace.startswith(f"{folder}/")
    (tmp_path / "slurm").mkdir()
    assert not site(tmp_path / "slurm", f"{STORAGE}slurm: {{partition: gpu}}\n").cluster.has_separate_folders


# Tests of the disk at /mydata.


def disk_plan(one: Site, place: MountPlace, *, there: bool = True, number: int = 0):
    target = one.targets[number]
    target.facts.answers |= {"place /mydata": place, "mkextrafs": there}
    return extra_disks.plan(one, target)


@pytest.mark.parametrize(("said", "known"), [("yes\n", True), ("no\n", False)])
def test_the_answer_whether_mkextrafs_is_installed_is_parsed(said, known):
    """The parser of the fact about the program mkextrafs.pl accepts only the answers `yes` and `no`."""
    assert mkextrafs.parse(said) is known
    with pytest.raises(ValueError, match="not yes or no"):
        mkextrafs.parse(said.upper())


def test_a_disk_is_made_of_unused_space_without_force_and_only_once(tmp_path):
    one = site(tmp_path)
    made = commands(disk_plan(one, MountPlace(there=False)))
    assert made == [
        "mkdir -p -- /mydata",
        "setsid --wait /usr/local/etc/emulab/mkextrafs.pl -q /mydata",
        "mountpoint -q -- /mydata",
    ]
    assert not any(word == "-f" for command in made for word in command.split())
    assert disk_plan(one, MOUNTED) == Nothing("/dev/nvme0n1p4 is mounted at /mydata")


def test_a_blockstore_that_is_mounted_is_used_and_one_that_is_not_is_mounted(tmp_path):
    store = Mount("/dev/mapper/emulab-bs", "ext4", ("rw",))
    assert disk_plan(site(tmp_path), MountPlace(mount=store, fstab=store), there=False) == Nothing(
        "/dev/mapper/emulab-bs is mounted at /mydata"
    )
    assert commands(disk_plan(site(tmp_path), MountPlace(fstab=store), there=False)) == [
        "mkdir -p -- /mydata",
        "mount -- /mydata",
    ]


def test_no_disk_is_made_without_the_program_or_over_existing_files(tmp_path):
    """Without mkextrafs.pl, or if the folder /mydata contains files, the plan fails and makes no file system."""
    with pytest.raises(Unanswered, match=r"gpu0: nothing is mounted at /mydata, and .*mkextrafs.pl does not exist: request"):
        disk_plan(site(tmp_path), MountPlace(), there=False)
    with pytest.raises(Unanswered, match="contains files that a mount would hide"):
        disk_plan(site(tmp_path), MountPlace(empty=False))


@pytest.mark.parametrize(
    ("more", "needs"),
    [
        (STORAGE, [True, False]),  # needs no disk on gpu1, which mounts the folder of gpu0
        (STORAGE + "data: {path: /mydata/sets}\n", [True, True]),
        (STORAGE + "data: {path: /mydata/shardlab/sets}\n", [True, False]),
        ("storage: {shared: /srv/shardlab, server: gpu0}\n", [False, False]),
        ("storage: {shared: /mydata2/x, server: gpu0}\n", [False, False]),
        ("storage: {shared: /mydata/shardlab}\n", [True, True]),
        ("storage: {disk: /dev/sdb, mount: /mydata, shared: /mydata/x, server: gpu0}\n", [False, False]),
        ("", [False, False]),
    ],
)
def test_only_nodes_with_a_folder_on_the_disk_get_the_disk(more, needs, tmp_path):
    one = site(tmp_path, more)
    assert [not isinstance(disk_plan(one, MountPlace(), number=number), Nothing) for number in (0, 1)] == needs


def test_nothing_is_written_below_mydata_before_it_is_mounted(tmp_path):
    one = site(tmp_path)
    server, client = one.targets
    (change,) = fstab.make_mount_checks(one, server)
    assert "mountpoint -q -- /mydata " in change.command
    assert ["/mydata/shardlab" in change.command for change in fstab.make_mount_checks(one, client)] == [True]
    server.facts.answers |= {
        "place /mydata": MountPlace(), "room /": FreeSpace(2 << 30, 10**6, "/"),
        SYSTEM.name: A_MACHINE, SLURM_HERE.name: SlurmHere(), ENVIRONMENT.name: InstalledEnvironment(),
        PACKAGES.name: Packages(dict.fromkeys(packages.ALL_PACKAGES, "1"), interrupted=False),
    }  # fmt: skip
    assert isinstance(space.plan(one, server), Nothing)  # `/` is small, but the environment will be in /mydata


def test_a_single_node_exports_its_folder_to_nobody(tmp_path):
    """A line in /etc/exports without a client would export the folder to every machine."""
    one = site(tmp_path, nodes=1)
    (target,) = one.targets
    target.facts.answers |= {
        "place /mydata/shardlab": MountPlace(there=False), SYSTEM.name: A_MACHINE, SERVICES.name: {}, FILES.name: {},
    }  # fmt: skip
    assert [command.split()[0] for command in commands(nfs.plan_nfs_server(one, target))] == ["sh", "install"]
    target.facts.answers["place /mydata/shardlab"] = MountPlace()
    assert nfs.plan_nfs_server(one, target) == Nothing("/mydata/shardlab exists, and there is no other node to export it to")


# Tests of the two networks.


def judged(nics=NICS, found=GOOD, **changes):
    given = {"address": "10.10.1.2", "mac": "0a:0b:0c:0d:00:01", "control": "192.0.2.2"} | changes
    return experiment_network.judge_interfaces(NodeEntry(name="gpu0", **given), nics, found)


def test_the_interface_with_the_manifests_mac_address_has_the_experiment_address():
    assert judged().passed is True
    assert judged().says == "10.10.1.2 is on ens5f0 (0a:0b:0c:0d:00:01), and the control address 192.0.2.2 on eno1"
    vlan = [*NICS, Nic("vlan100", "virtual", mac="0a:0b:0c:0d:00:01")]
    assert judged(vlan, {"eno1": ["192.0.2.2"], "vlan100": ["10.10.1.2"]}).passed is True
    assert judged(mac=None).passed is True
    assert "does not state" in judged(mac=None).says


@pytest.mark.parametrize(
    ("nics", "found", "mac", "says"),
    [
        (NICS[:1], GOOD, NICS[1].mac, "no interface has the MAC address 0a:0b:0c:0d:00:01 of the manifest"),
        (NICS, {"eno1": ["10.10.1.2", "192.0.2.2"]}, NICS[1].mac, "ens5f0 with .* have 10.10.1.2, but it is on eno1"),
        (NICS, {"eno1": ["192.0.2.2"]}, NICS[1].mac, "but no interface has it"),
        (NICS, {"eno1": ["192.0.2.2"]}, None, "no interface has the experiment address 10.10.1.2"),
        (NICS, {"ens5f0": ["10.10.1.2"]}, NICS[1].mac, "no interface has the control address 192.0.2.2"),
        (NICS, {"ens5f0": ["10.10.1.2", "192.0.2.2"]}, NICS[1].mac, "ens5f0 has both the experiment address"),
        (NICS, {"eno1": ["10.10.1.2", "192.0.2.2"]}, None, "eno1 has both the experiment address"),
    ],
)  # fmt: skip
def test_a_network_that_is_not_as_the_manifest_says_fails(nics, found, mac, says):
    outcome = judged(nics, found, mac=mac)
    assert outcome.passed is False
    assert outcome.advice
    assert re.search(says, outcome.says)


def told(one: Site, number: int, nics=NICS, found=GOOD) -> Target:
    """A node of the experiment whose facts report these interfaces."""
    target = one.targets[number]
    seen = msgspec.structs.replace(host.read_host(), nics=list(nics))
    target.facts.answers |= {HOST.name: seen, ADDRESSES.name: addresses.parse(json.dumps(found))}
    return target


def test_the_check_compares_the_node_with_its_manifest(tmp_path):
    one = site(tmp_path)
    assert experiment_network.run(one, told(one, 0)).passed is True
    assert experiment_network.run(one, told(one, 1)).passed is False  # the interfaces are those of gpu0, not of gpu1
    entry = one.targets[0].node_entry
    wrong = Target(one.targets[0].node, one.targets[0].facts, msgspec.structs.replace(entry, address=entry.control))
    outcome = experiment_network.run(one, wrong)
    assert (outcome.passed, outcome.says) == (
        False, "192.0.2.2, on which the nodes would train, is its address on the control network",
    )  # fmt: skip
    assert [check.name for stage in order.select_checks(find_provider("cloudlab")) for check in stage].count(
        "experiment_network"
    ) == 1


def test_the_inventory_records_both_networks(tmp_path):
    one = site(tmp_path, nodes=1)
    target = told(one, 0)
    target.facts.answers |= {SLURM_HERE.name: SlurmHere()}
    (recorded,) = json.loads(inventory.render_inventory(one))["nodes"]
    assert recorded["networks"] == {
        "experiment": {"address": "10.10.1.2", "interface": "ens5f0", "mac": "0a:0b:0c:0d:00:01"},
        "control": {"address": "192.0.2.2", "interface": "eno1", "mac": "aa:00:00:00:00:01"},
    }
    assert experiment_interfaces.find_node_interfaces(Target(target.node, target.facts, NodeEntry(name="gpu0"))) is None


# Tests of the all-reduce.

REPORT = CommandOutput(
    0, json.dumps({"backend": "gloo", "ranks": 2, "bytes": 1_000_000, "wrong": 0, "iterations": 10, "time_s": 0.001}), ""
)
SENT = 10_000_000  # bytes that each of two nodes sends in theory


@pytest.mark.parametrize(
    ("control", "passed"),
    [(0, True), (SENT // 50, True), (SENT // 50 + 1, False), (SENT, False)],
)
def test_at_most_two_percent_of_the_data_may_use_the_control_network(control, passed):
    grown = [{"ens5f0": SENT, "eno1": control}, {"ens5f0": SENT, "eno1": 5}]
    outcome = network.judge_network(
        [REPORT], ["ens5f0", "ens5f0"], grown, control_interfaces=[("gpu0", "eno1"), ("gpu1", "eno1")]
    )
    assert outcome.passed is passed
    assert passed or "the control network, which is only for logins, carried data of the all-reduce: gpu0 sent" in outcome.says
    assert "gpu1" not in outcome.says


def test_a_rendezvous_on_the_control_address_does_not_pass_as_the_right_interface():
    """The cluster file names the control addresses by mistake, so each node's own interface is the control interface."""
    grown = [{"eno1": SENT}, {"eno1": SENT}]
    assert network.judge_network([REPORT], ["eno1", "eno1"], grown).passed is True
    outcome = network.judge_network([REPORT], ["eno1", "eno1"], grown, control_interfaces=[("gpu0", "eno1"), ("gpu1", "eno1")])
    assert outcome.passed is False
    assert "gpu0 sent 10 MB over eno1, gpu1 sent 10 MB over eno1" in outcome.says


NCCL = (
    "gpu0:4:5 [0] NCCL INFO NET/IB : Using [0]mlx5_2:1/RoCE [RO]; OOB ens5f0:10.10.1.1<0>\n"
    "gpu0:4:6 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"
)
LINKS = [RdmaLink("mlx5_0", 1, "ACTIVE", "Ethernet", "eno1", []), RdmaLink("mlx5_2", 1, "ACTIVE", "Ethernet", "ens5f0", [])]
NOTHING = [{"ens5f0": 5, "eno1": 5}] * 2  # the kernel's counters of an interface do not count RDMA


def judged_nccl(log):
    answer = CommandOutput(0, log + REPORT.stdout.replace("gloo", "nccl") + "\n", "")
    controls = [("gpu0", "eno1"), ("gpu1", "eno1")]
    return network.judge_network(
        [answer, answer], ["ens5f0", "ens5f0"], NOTHING, control_interfaces=controls, links_by_node=[LINKS, LINKS]
    )


def test_rdma_over_the_experiment_network_passes_and_over_the_control_network_fails():
    outcome = judged_nccl(NCCL)
    assert outcome.passed is True
    assert "; NCCL took NET/IB on mlx5_2 (RoCE)" in outcome.says
    outcome = judged_nccl(NCCL.replace("mlx5_2", "mlx5_0"))
    assert outcome.passed is False
    assert "NCCL uses RDMA over the control network, which is only for logins: gpu0 mlx5_0 (eno1), gpu1 mlx5_0" in outcome.says
    outcome = judged_nccl("")  # only the counters of the interfaces can show where the data was sent
    assert outcome.passed is False
    assert "0 of 10 MB were sent over ens5f0" in outcome.says
    assert "RDMA cannot be ruled out, because NCCL's log names no transport" in outcome.says
    assert judged_nccl(NCCL.replace("NET/IB/0", "NET/Foo/0")).passed is True  # an unknown plug-in may use RDMA


class RecordingNode:
    """A node that records its commands; its all-reduce answers with the report of NCCL over RDMA."""

    port, user, identity, wheelhouse, may_sudo, python = None, None, None, None, True, "/p/bin/python"

    def __init__(self, name: str, address: str) -> None:
        self.name, self.host, self.address, self.calls = name, address, address, []

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False):
        self.calls.append((argv, env or {}))
        answer = NCCL + REPORT.stdout.replace("gloo", "nccl") + "\n"
        return CommandOutput(0, "ens5f0 5\n" if argv[0] == "sh" else answer, "")


@pytest.mark.parametrize(("gpus", "backend"), [([4, 4], "nccl"), ([4, None], "gloo"), ([None, None], "gloo")])
def test_the_all_reduce_between_nodes_uses_nccl_if_all_nodes_have_gpus(gpus, backend):
    targets = []
    for number, count in enumerate(gpus, 1):
        recording = RecordingNode(f"gpu{number}", f"10.10.1.{number}")
        facts = FactAnswers(recording)
        torch = Torch(version="2.13.0", gpus=count, backends=["gloo", "nccl"])
        facts.answers |= {ADDRESSES.name: {"ens5f0": [recording.address]}, TORCH.name: torch, RDMA.name: LINKS}
        facts.answers[HOST.name] = SimpleNamespace(gpus=[SimpleNamespace(name="A100")])
        targets.append(Target(recording, facts, NodeEntry(name=recording.name, host=recording.host)))
    outcome = network.run(Site(cluster.Cluster(schema=1, name="bench", provider="ssh"), None, targets), targets[0])
    for rank, target in enumerate(targets):
        ((argv, env),) = [call for call in target.node.calls if call[0][0] != "sh"]
        assert argv[3:] == [backend, "2", str(rank), "10.10.1.1:29411"]
        assert (env["NCCL_SOCKET_IFNAME"], env["NCCL_DEBUG"]) == ("=ens5f0", "INFO")
    assert outcome.passed is True, outcome


# Tests of the all-reduce over two real networks, in network namespaces.

WHY = why_not()


class InNamespace:
    """A node with its own network namespace. It has the methods of `provision`'s class Node.

    The node shares everything else with this machine.
    """

    port, user, identity, wheelhouse, may_sudo, python = None, None, None, None, True, sys.executable

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.space = f"shardlab-{os.getpid()}-{number}"
        self.host, self.address = f"10.99.1.{number}", f"10.99.2.{number}"

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False):
        done = subprocess.run(
            ["ip", "netns", "exec", self.space, *argv],
            capture_output=True, text=True, check=False, timeout=timeout_s, env={**os.environ, **(env or {})},
        )  # fmt: skip
        return CommandOutput(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def experiment():
    """Two nodes that are connected by a control network (ctl) and an experiment network (exp)."""
    nodes = [InNamespace("gpu0", 1), InNamespace("gpu1", 2)]
    try:
        for one in nodes:
            ip("netns", "add", one.space)
        for name in ("ctl", "exp"):
            first, second = (one.space for one in nodes)
            ip("-n", first, "link", "add", name, "type", "veth", "peer", "name", name, "netns", second)
        for one in nodes:
            ip("-n", one.space, "link", "set", "lo", "up")
            for third, name in enumerate(("ctl", "exp"), 1):
                ip("-n", one.space, "address", "add", f"10.99.{third}.{one.number}/24", "dev", name)
                ip("-n", one.space, "link", "set", name, "up")
        yield nodes
    finally:
        for one in nodes:
            subprocess.run(["ip", "netns", "delete", one.space], capture_output=True, check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def reduced(nodes, *, by_control: bool):
    """The outcome of the check `network`.

    by_control: whether the cluster file names the control addresses, by mistake.
    """
    targets = []
    for one in nodes:
        one.address = one.host if by_control else one.address
        entry = NodeEntry(name=one.name, host=one.host, address=one.address, control=one.host)
        targets.append(Target(one, FactAnswers(one), entry))
    one_site = Site(cluster.Cluster(schema=1, name="bench", provider="cloudlab"), None, targets)
    return network.run(one_site, targets[0])


@pytest.mark.skipif(WHY is not None, reason=WHY or "")
def test_traffic_on_the_control_network_is_noticed_by_the_kernels_counters(experiment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    outcome = reduced(experiment, by_control=False)
    assert outcome.passed is True, outcome
    assert "all-reduce of 2 nodes over exp is exact" in outcome.says
    outcome = reduced(experiment, by_control=True)
    assert outcome.passed is False
    assert outcome.says.startswith("the control network, which is only for logins, carried data of the all-reduce: gpu0 sent")
