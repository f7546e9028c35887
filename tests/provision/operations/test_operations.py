"""Tests of operations, as data: answers of nodes lead to commands; a state that is already reached needs no change."""

import hashlib
import io
import re
import tarfile

import msgspec
import pytest

from provision import software
from provision.fact import FactAnswers, Unanswered
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.files import FILES, NodeFile
from provision.facts.nodes import NODES
from provision.facts.nodes import parse as parse_nodes
from provision.facts.packages import PACKAGES, Packages
from provision.facts.services import SERVICES, Service
from provision.facts.slurm_here import SLURM_HERE, SlurmHere
from provision.facts.system import SYSTEM, System
from provision.node import CommandOutput
from provision.operation import Nothing, Site, Target, failure_reason
from provision.operations import environment, hosts, munge, nfs, packages, slurm, slurm_files
from provision.providers.ssh import SshNode
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry, Ssh, Storage
from shardlab.cluster.slurm_keys import Gpus, Slurm

A_MACHINE = System(
    id="debian", codename="bookworm", pretty="Debian", kernel="6.1", arch="x86_64", hostname="x", virt="none", boot_id="1",
    cpus=64, memory_kib=512 * 2**20, cgroup="cgroup2fs", user="alice",
)  # fmt: skip
KEY = NodeFile(0o400, "munge:munge", 100.0, "a" * 64)
RUNNING = {name: Service("active", True, 200.0) for name in ("munge", "mariadb", "slurmdbd", "slurmctld", "slurmd", "chrony")}


def site(*, gpus=None, shared=None, slurm_=True, **of_worker) -> Site:
    """A site with a controller and two workers. The keyword arguments change the answers of one worker."""
    entries = [NodeEntry(name="head", roles=["controller"]), NodeEntry(name="w1"), NodeEntry(name="w2")]
    cluster = Cluster(
        schema=1,
        name="bench",
        provider="ssh",
        nodes=entries,
        gpus=gpus,
        storage=Storage(shared),
        slurm=Slurm() if slurm_ else None,
    )
    found = []
    for number, entry in enumerate(entries, start=1):
        node = SshNode(entry.name, f"10.0.0.{number}", None, "alice", None, "/opt/shardlab/python-x/bin/python", remote=None)
        target = Target(node, FactAnswers(node), entry)
        of_node = {name: value for name, value in of_worker.items() if entry.name == "w2"}
        target.facts.answers = {
            SYSTEM.name: of_node.get("system", A_MACHINE),
            PACKAGES.name: of_node.get("packages", Packages({}, interrupted=False)),
            FILES.name: of_node.get("files", {}),
            SERVICES.name: of_node.get("services", {}),
            ENVIRONMENT.name: of_node.get("environment", InstalledEnvironment()),
            NODES.name: {},
            SLURM_HERE.name: SlurmHere(),
        }
        found.append(target)
    return Site(cluster, None, found)


def commands(planned) -> list[str]:
    assert not isinstance(planned, Nothing), planned
    return [change.command for change in planned]


def with_files(target: Target, wanted: dict[str, tuple[bytes, int, str]], at: float = 100.0) -> None:
    """Changes the known facts of the node as if these files had been written."""
    found = {
        path: NodeFile(mode, owner, at, hashlib.sha256(content).hexdigest()) for path, (content, mode, owner) in wanted.items()
    }
    target.facts.answers[FILES.name] = {**target.facts.answers[FILES.name], **found}


def test_packages_depend_on_the_role_of_a_node():
    head, w1, _ = site().targets
    assert packages.list_needed_packages(site(), head) == [
        "chrony",
        "mariadb-server",
        "munge",
        "python3-venv",
        "slurm-client",
        "slurmctld",
        "slurmdbd",
    ]
    assert packages.list_needed_packages(site(), w1) == ["chrony", "munge", "python3-venv", "slurm-client", "slurmd"]
    bare = site(slurm_=False)
    assert packages.list_needed_packages(bare, w1) == ["chrony", "python3-venv"]
    from_node_to_node = msgspec.structs.replace(bare.cluster, ssh=Ssh(between_nodes=True))
    between = msgspec.structs.replace(bare, cluster=from_node_to_node)
    assert packages.list_needed_packages(between, w1) == ["chrony", "openssh-client", "python3-venv"]


def test_packages_are_installed_with_the_lock_waited_for_and_nothing_asked():
    one = site()
    refresh, install = commands(packages.plan(one, one.targets[1]))
    assert "apt-get" in refresh
    assert "DPkg::Lock::Timeout=600" in install
    assert "DEBIAN_FRONTEND=noninteractive" in install
    assert install.endswith("--no-install-recommends install chrony munge python3-venv slurm-client slurmd'")


def test_installed_packages_need_no_change_unless_an_installation_was_interrupted():
    there = dict.fromkeys(packages.ALL_PACKAGES, "1")
    done = site(packages=Packages(there, interrupted=False))
    assert packages.plan(done, done.targets[2]) == Nothing("all packages are installed")
    broken = site(packages=Packages(there, interrupted=True))
    (repair,) = commands(packages.plan(broken, broken.targets[2]))
    assert "dpkg --force-confdef --force-confold --configure -a || apt-get" in repair
    assert "--fix-broken install" in repair


def test_etc_hosts_has_the_names_of_all_nodes_and_none_for_loopback():
    """/etc/hosts gets the names of all nodes, and no line with 127.0.1.1."""
    one = site()
    changes = hosts.plan(one, one.targets[1])
    assert [change.description for change in changes] == [
        "set the hostname w1 (now x)",
        "write the names of all 3 nodes into /etc/hosts",
    ]
    lines = changes[1].content.decode().splitlines()
    assert lines[-3:] == ["10.0.0.1 head", "10.0.0.2 w1", "10.0.0.3 w2"]
    assert "127.0.1.1" not in changes[1].content.decode()


def test_correct_names_in_etc_hosts_need_no_change():
    one = site(system=msgspec.structs.replace(A_MACHINE, hostname="w2"))
    with_files(one.targets[2], {hosts.HOSTS_PATH: (hosts.render_hosts(one), 0o644, "root:root")})
    assert isinstance(hosts.plan(one, one.targets[2]), Nothing)


def test_the_key_is_random_and_readable_by_munge_alone():
    one = site()
    head, w1, _ = one.targets
    make, enable, start = commands(munge.plan_munge_key(one, head))
    assert "/dev/urandom" in make
    assert "umask 077" in make
    assert "chmod 400" in make
    assert (enable, start) == ("systemctl enable --quiet munge", "systemctl restart munge")
    assert munge.plan_munge_key_copy(one, w1)[0].description == "copy the munge key from head"  # head makes the key first
    head.facts.answers[FILES.name] = {munge.MUNGE_KEY_PATH: KEY}
    changes = munge.plan_munge_key_copy(one, w1)
    assert changes[0].description == "copy the munge key from head"
    assert changes[0].command == ""  # the key is never part of a command


@pytest.mark.parametrize(
    "found", [NodeFile(0o600, "munge:munge", 1.0, "a" * 64), NodeFile(0o400, "alice:alice", 1.0, "a" * 64)]
)
def test_a_key_that_others_could_read_is_made_anew(found):
    one = site()
    head = one.targets[0]
    head.facts.answers |= {FILES.name: {munge.MUNGE_KEY_PATH: found}, SERVICES.name: RUNNING}
    changes = munge.plan_munge_key(one, head)
    assert changes[0].description.startswith("make a new munge key")
    assert changes[-1].command == "systemctl restart munge"


def test_a_munge_key_equal_to_the_controllers_needs_no_change():
    one = site(files={munge.MUNGE_KEY_PATH: KEY}, services=RUNNING)
    head, _, w2 = one.targets
    head.facts.answers |= {FILES.name: {munge.MUNGE_KEY_PATH: KEY}, SERVICES.name: RUNNING}
    assert isinstance(munge.plan_munge_key(one, head), Nothing)
    assert isinstance(munge.plan_munge_key_copy(one, w2), Nothing)


def test_accounts_need_no_password():
    one = site()
    changes = slurm.plan_accounts(one, one.targets[0])
    text = " ".join(commands(changes)) + "".join(getattr(change, "content", b"").decode() for change in changes)
    assert "IDENTIFIED VIA unix_socket" in text
    assert "StoragePass" not in text
    assert "-m 600 -o slurm -g slurm" in text
    with_files(one.targets[0], {slurm.DBD_CONF: (slurm_files.render_slurmdbd_conf(one), 0o600, "slurm:slurm")})
    one.targets[0].facts.answers[SERVICES.name] = RUNNING
    assert isinstance(slurm.plan_accounts(one, one.targets[0]), Nothing)


def test_slurm_conf_has_processors_memory_and_gpus_of_each_worker():
    """slurm.conf on the controller has the processors, memory and GPUs of each worker, as its facts say."""
    one = site(gpus=Gpus(per_node=4, type="a100"))
    written = {
        change.path: change.content.decode() for change in slurm.plan_controller(one, one.targets[0]) if hasattr(change, "path")
    }
    conf = written["/etc/slurm/slurm.conf"].splitlines()
    memory = int(512 * 2**20 / 1024 * 0.95)
    assert f"NodeName=w1 NodeAddr=10.0.0.2 CPUs=64 RealMemory={memory} Gres=gpu:a100:4 State=UNKNOWN" in conf
    assert "SlurmctldHost=head(10.0.0.1)" in conf
    assert "ProctrackType=proctrack/cgroup" in conf
    assert (
        "PartitionName=batch Nodes=w1,w2 Default=YES DefaultTime=60 MaxTime=INFINITE "
        f"DefMemPerCPU={memory // 64} State=UP" in conf
    )
    assert "NodeName=w2 Name=gpu Type=a100 File=/dev/nvidia[0-3]" in written["/etc/slurm/gres.conf"]
    assert "CgroupPlugin=cgroup/v2" in written["/etc/slurm/cgroup.conf"]
    assert "ConstrainDevices=yes" in written["/etc/slurm/cgroup.conf"]


def test_nodes_that_share_a_kernel_get_a_slurm_without_cgroups():
    """Nodes that share a kernel and have no control groups get a configuration of Slurm that does not use control groups."""
    one = site(system=msgspec.structs.replace(A_MACHINE, virt="systemd-nspawn", cgroup="tmpfs"))
    written = slurm_files.render_slurm_files(one)
    assert b"ProctrackType=proctrack/linuxproc" in written["/etc/slurm/slurm.conf"]
    assert b"CgroupPlugin=cgroup/v1" in written["/etc/slurm/cgroup.conf"]
    assert b"Constrain" not in written["/etc/slurm/cgroup.conf"]


@pytest.mark.parametrize(
    ("slurmctld", "plugin"),
    [
        ("22.05.8-4+deb12u3", "cgroup/v2"),
        ("23.11.4-1.2ubuntu5", "cgroup/v2"),
        ("24.05.2-1", "disabled"),
        ("24.11.5-4+deb13u1", "disabled"),
        ("26.05.5-1", "disabled"),
    ],
)
def test_containers_with_only_cgroups_v2_disable_the_cgroup_plugin_if_possible(slurmctld, plugin):
    """Containers get `CgroupPlugin=disabled` if their Slurm has this value (since 24.05). Machines always get cgroup/v2."""
    containers = site()
    for target in containers.targets:
        target.facts.answers[SYSTEM.name] = msgspec.structs.replace(A_MACHINE, virt="systemd-nspawn")
    containers.targets[0].facts.answers[PACKAGES.name] = Packages({"slurmctld": slurmctld}, interrupted=False)
    assert f"CgroupPlugin={plugin}\n".encode() in slurm_files.render_slurm_files(containers)["/etc/slurm/cgroup.conf"]
    machines = site()
    machines.targets[0].facts.answers[PACKAGES.name] = Packages({"slurmctld": slurmctld}, interrupted=False)
    assert b"CgroupPlugin=cgroup/v2\n" in slurm_files.render_slurm_files(machines)["/etc/slurm/cgroup.conf"]


def test_a_correct_controller_needs_no_change_but_a_missed_start():
    one = site()
    head = one.targets[0]
    with_files(head, {path: (content, 0o644, "root:root") for path, content in slurm_files.render_slurm_files(one).items()})
    head.facts.answers[SERVICES.name] = RUNNING
    assert isinstance(slurm.plan_controller(one, head), Nothing)
    with_files(
        head, {path: (content, 0o644, "root:root") for path, content in slurm_files.render_slurm_files(one).items()}, at=300.0
    )
    assert commands(slurm.plan_controller(one, head)) == ["systemctl restart slurmctld"]


def test_a_worker_that_is_away_leaves_the_configuration_as_it_is():
    one = site()
    head = one.targets[0]
    with_files(head, {slurm.SLURM_CONF: (b"of three workers", 0o644, "root:root")})
    head.facts.answers[SERVICES.name] = RUNNING
    one.skipped["w2"] = "machine failed"
    assert slurm.plan_controller(one, head) == Nothing("slurm.conf not changed: w2 cannot be asked")


def test_workers_ask_the_controller_for_their_configuration():
    one = site(services=RUNNING)
    head, w1, w2 = one.targets
    with_files(head, {slurm.SLURM_CONF: (b"", 0o644, "root:root")}, at=100.0)
    changes = slurm.plan_worker(one, w1)
    options = next(change for change in changes if getattr(change, "path", "") == slurm.WORKER_OPTIONS)
    assert options.content == b'SLURMD_OPTIONS="--conf-server 10.0.0.1:6817 -N w1"\n'
    unit = next(change for change in changes if getattr(change, "path", "") == slurm.WORKER_UNIT)
    with_files(w2, {slurm.WORKER_OPTIONS: (options.content.replace(b"w1", b"w2"), 0o644, "root:root")})
    with_files(w2, {slurm.WORKER_UNIT: (unit.content, 0o644, "root:root")})
    assert isinstance(slurm.plan_worker(one, w2), Nothing)
    with_files(head, {slurm.SLURM_CONF: (b"", 0o644, "root:root")}, at=300.0)
    assert commands(slurm.plan_worker(one, w2)) == ["systemctl restart slurmd"]


def test_workers_that_are_ready_are_not_waited_for():
    one = site()
    head = one.targets[0]
    head.facts.answers[NODES.name] = parse_nodes("w1|idle|root|none\nw2|mix-|root|none\n")
    assert slurm.plan_nodes(one, head) == Nothing("2 workers are ready")
    head.facts.answers[NODES.name] = parse_nodes("w1|idle|root|none\nw2|down*|slurm|Not responding\n")
    (wait,) = slurm.plan_nodes(one, head)
    assert wait.description == "wait until all workers are ready (w2: down)"


def test_the_environment_has_a_digest_as_name_and_is_made_once():
    one = site()
    changes = environment.plan(one, one.targets[1])
    text = "\n".join(commands(changes))
    assert "-c /opt/shardlab/python-x/constraints.txt" in text
    assert re.search(r"'torch[<>=]+2\.", text)
    assert "runuser -u alice" in text
    there = InstalledEnvironment(packages=software.compute_packages_digest(), source=software.digest_source(), version="3.11")
    made = site(environment=there)
    assert isinstance(environment.plan(made, made.targets[2]), Nothing)
    old = site(environment=InstalledEnvironment(packages=software.compute_packages_digest(), source="0" * 12, version="3.11"))
    assert len(environment.plan(old, old.targets[2])) == 2  # only the source is installed again
    shared = site(shared="/mydata")
    assert environment.plan(shared, shared.targets[1]) == Nothing(
        "head makes the environment for all nodes, on the shared storage"
    )
    assert not isinstance(environment.plan(shared, shared.targets[0]), Nothing)


def test_the_environment_is_made_from_the_interpreter_that_the_node_names():
    one = site()
    assert "runuser -u alice -- python3 -m venv" in "\n".join(commands(environment.plan(one, one.targets[1])))
    one.targets[1].node.venv_python = "/opt/python-3.11/bin/python3"
    made = "\n".join(commands(environment.plan(one, one.targets[1])))
    assert "runuser -u alice -- /opt/python-3.11/bin/python3 -m venv" in made


def test_the_source_is_the_same_bytes_each_time():
    first = software.make_source_archive()
    software.make_source_archive.cache_clear()
    assert software.make_source_archive() == first


def test_the_source_can_be_read_by_every_user_of_a_node_and_names_no_user_or_time():
    with tarfile.open(fileobj=io.BytesIO(software.make_source_archive())) as archive:
        assert {(entry.mode, entry.uid, entry.gid, entry.mtime) for entry in archive} == {(0o644, 0, 0, 0)}


@pytest.mark.parametrize("word", ["a b", "x\nProlog=/x", "$(id)", ""])
def test_a_name_that_could_end_a_line_is_refused(word):
    one = site()
    one.targets[1].node.host = word
    with pytest.raises(Unanswered, match=r"is not allowed in slurm\.conf"):
        slurm_files.render_slurm_files(one)


def test_the_marker_of_a_complete_configuration_is_written_last():
    one = site(gpus=Gpus(per_node=4, type="a100"))
    written = [change.path for change in slurm.plan_controller(one, one.targets[0]) if hasattr(change, "path")]
    assert len(written) == 3
    assert written[-1] == slurm.SLURM_CONF


def test_slurm_nfs_and_names_use_the_address_of_the_training_network():
    one = site(shared="/srv/shared")
    one.targets[:] = [
        Target(msgspec.structs.replace(target.node, own_address=f"172.16.0.{number}"), target.facts, target.node_entry)
        for number, target in enumerate(one.targets, start=1)
    ]
    texts = [hosts.render_hosts(one), nfs.render_exports(one, one.targets[0]), *slurm_files.render_slurm_files(one).values()]
    assert b"172.16.0.2 w1\n" in texts[0]
    assert b"172.16.0.3(" in texts[1]
    assert any(b"NodeAddr=172.16.0.2 " in text for text in texts)
    assert not any(b"10.0.0." in text for text in texts)


def test_the_reason_of_a_failure_names_a_network_that_did_not_answer_before():
    retries = "WARNING: Retrying after connection broken: [Errno -3] Temporary failure in name resolution\n"
    assert failure_reason(CommandOutput(1, "", f"{retries}ERROR: ResolutionImpossible\n")) == (
        "ERROR: ResolutionImpossible; before that: Temporary failure in name resolution"
    )
    assert failure_reason(CommandOutput(1, "", "ERROR: ResolutionImpossible\n")) == "ERROR: ResolutionImpossible"
