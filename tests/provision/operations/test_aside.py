"""Creates real disks, users and keys with this machine's own tools, in namespaces, so that the machine itself does not
change."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from support_aside import Aside, settle, why_not
from support_e2e import HANG_S

from provision.fact import Unanswered
from provision.facts import disk as disk_fact
from provision.facts.keys import KEYS
from provision.facts.users import USERS, User
from provision.facts.write_test import WriteTest, make_write_test_query
from provision.operation import Nothing, Site
from provision.operations import disks
from provision.operations.keys import SSH_KEYS, SSH_TRUST
from provision.operations.users import MUNGE_USER, USERS_AGREE
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry, Ssh, Storage
from shardlab.cluster.slurm_keys import Slurm

# A DOS partition table with one Linux partition, which starts at the second sector.
PARTITIONS = (
    r"printf '\000\000\000\000\203\000\000\000\001\000\000\000\000\020\000\000' | dd of={0} bs=1 seek=446 conv=notrunc; "
    r"printf '\125\252' | dd of={0} bs=1 seek=510 conv=notrunc"
)
# The superblock of a RAID member, format 0.90. It lies 64 KiB before the end of the disk; everything before it is zeros.
RAID = (
    r"printf '\374\116\053\251\000\000\000\000\132\000\000\000' | dd of={0} bs=1 seek=$(($(blockdev --getsize64 {0}) - 65536)) "
    "conv=notrunc"
)
WHY = why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")


@pytest.fixture
def nodes(tmp_path):
    found = []
    for number, name in enumerate(("w1", "w2"), start=1):
        (tmp_path / name).mkdir()
        found.append(Aside(name, f"10.0.0.{number}", tmp_path / name))
    yield found
    for node in found:
        node.end()


def site(nodes, **keys) -> Site:
    entries = [NodeEntry(name=node.name) for node in nodes]
    cluster = Cluster(schema=1, name="bench", provider="ssh", nodes=entries, **keys)
    return Site(cluster, None, [node.target() for node in nodes])


@pytest.fixture
def loop(tmp_path):
    image = tmp_path / "image"
    with image.open("wb") as handle:
        handle.truncate(64 * 2**20)
    done = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    yield done.stdout.strip()
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


@pytest.fixture
def mydata():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # `storage.mount` may contain no space, unlike TMPDIR
        yield f"{folder}/mydata"


@pytest.fixture
def as_a_disk(monkeypatch):
    """Makes shardlab treat a loop device as a disk."""
    program = disk_fact.DESCRIBE_DISK.replace("tr -d '\\n')", 'tr -d \'\\n\' | sed \'s/"type": *"loop"/"type":"disk"/\')')
    assert program != disk_fact.DESCRIBE_DISK
    monkeypatch.setattr(disk_fact, "DESCRIBE_DISK", program)


def test_a_loop_device_is_no_whole_disk(nodes, loop, mydata):
    one = site(nodes, storage=Storage(disk=loop, mount=mydata))
    with pytest.raises(Unanswered, match="it is not a whole disk but a loop"):
        disks.plan(one, one.targets[0])


def test_an_empty_disk_is_made_and_mounted_and_fstab_keeps_what_it_had(nodes, loop, as_a_disk, mydata):
    one = site(nodes, storage=Storage(disk=loop, mount=mydata))
    target = one.targets[0]
    assert settle(disks.DISKS, one, target)[0] == f"make an ext4 file system on {loop}, which is empty"
    *theirs, ours = target.node.run(["cat", "/etc/fstab"], timeout_s=HANG_S).stdout.splitlines()
    assert theirs == ["# theirs", "proc /proc proc defaults 0 0"]
    assert ours.startswith("UUID=")
    assert ours.endswith(f" {mydata} ext4 defaults,nofail 0 2")
    assert target.node.run(["findmnt", "-no", "SOURCE", mydata], timeout_s=HANG_S).stdout == f"{loop}\n"
    # The state is now as if `provision` had been killed after it formatted the disk: before the mount, and then also before the
    # line in fstab. The next plan continues there and does not format the disk again.
    target.node.run(["umount", mydata], timeout_s=HANG_S)
    target.facts.forget_answers()
    assert settle(disks.DISKS, one, target) == [f"make the folder {mydata}", f"mount {mydata}"]
    target.node.run(["sh", "-c", f"umount {mydata}; sed -i /mydata/d /etc/fstab"], timeout_s=HANG_S)
    target.facts.forget_answers()
    assert settle(disks.DISKS, one, target)[0] == f"mount {loop} at {mydata} at every boot (/etc/fstab)"


@pytest.mark.parametrize(
    ("fill", "what"),
    [
        ("mkfs.ext4 -q {}", "a signature of ext4"),
        ("mkswap {}", "a signature of swap"),
        (PARTITIONS, "a signature of dos"),
        (RAID, "a signature of linux_raid_member"),
        ("echo data | dd of={} bs=1 seek=70000 conv=notrunc", "data of no known kind in its first MiB"),
    ],
)
def test_a_disk_that_holds_anything_is_never_touched(nodes, loop, as_a_disk, mydata, fill, what):
    one = site(nodes, storage=Storage(disk=loop, mount=mydata))
    planned_before = disks.plan(one, one.targets[0])
    subprocess.run(["sh", "-euc", fill.format(loop)], check=True, capture_output=True)
    before = Path(loop).read_bytes()
    with pytest.raises(Unanswered):  # this plan was made before the disk was filled
        planned_before[0].make(one.targets[0].node)
    one.targets[0].facts.forget_answers()
    with pytest.raises(Unanswered, match=what):
        disks.plan(one, one.targets[0])
    assert Path(loop).read_bytes() == before


def test_files_below_the_mount_point_stop_the_mount(nodes, loop, as_a_disk, tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "thesis").write_text("")
    one = site(nodes, storage=Storage(disk=loop, mount=str(folder)))
    with pytest.raises(Unanswered, match="contains files that a mount would hide"):
        disks.plan(one, one.targets[0])


def test_munge_gets_the_same_numbers_on_all_nodes(nodes):
    for node in nodes:
        node.run(["sh", "-c", "userdel munge; groupdel munge"], timeout_s=HANG_S)
    one = site(nodes, slurm=Slurm())
    first, second = one.targets
    assert settle(MUNGE_USER, one, first) == ["make the user munge, 499:499 on all nodes"]
    settle(MUNGE_USER, one, second)
    assert first.facts[USERS].known["munge"] == User(499, 499) == second.facts[USERS].known["munge"]
    assert isinstance(USERS_AGREE.plan(one, second), Nothing)
    second.node.run(["usermod", "-u", "498", "munge"], timeout_s=HANG_S)
    second.facts.forget_answers()
    with pytest.raises(Unanswered, match="w2: the user munge is 498:499 there and 499:499 on w1"):
        USERS_AGREE.plan(one, second)


def test_nodes_know_one_anothers_keys_and_other_lines_stay(nodes):
    one = site(nodes, ssh=Ssh(between_nodes=True))
    for target in one.targets:
        target.node.run(
            ["sh", "-c", "mkdir -p /root/.ssh /etc/ssh; printf theirs > /root/.ssh/authorized_keys"], timeout_s=HANG_S
        )
        make = "cd /etc/ssh; rm -f ssh_host_* ssh_known_hosts; ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key"
        assert target.node.run(["sh", "-c", make], timeout_s=HANG_S).code == 0
        settle(SSH_KEYS, one, target)
    for target in one.targets:
        assert len(settle(SSH_TRUST, one, target)) == 2
    for target in one.targets:
        lines = target.facts[KEYS].authorized
        assert lines[0] == "theirs"
        assert [line.split()[-1] for line in lines[2:4]] == ["root@w1", "root@w2"]
        for other in one.targets:
            for name in (other.node.name, other.node.host):
                known = target.node.run(["ssh-keygen", "-F", name, "-f", "/etc/ssh/ssh_known_hosts"], timeout_s=HANG_S).stdout
                assert other.facts[KEYS].hosts[0] in known
    modes = "stat -c '%a %n' /root/.ssh/id_ed25519 /root/.ssh/authorized_keys /etc/ssh/ssh_known_hosts; ls -A /root/.ssh"
    said = one.targets[0].node.run(["sh", "-c", modes], timeout_s=HANG_S).stdout.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["600", "600", "644"]
    assert sorted(said[3:]) == ["authorized_keys", "id_ed25519", "id_ed25519.pub"]  # no temporary file is left
    # If the key of a node changes, all nodes get the new key, and the old key is no longer accepted.
    second = one.targets[1]
    old = second.facts[KEYS].key
    second.node.run(["sh", "-c", "rm /root/.ssh/id_ed25519"], timeout_s=HANG_S)
    second.facts.forget_answers()
    settle(SSH_KEYS, one, second)
    settle(SSH_TRUST, one, one.targets[0])
    assert old not in "\n".join(one.targets[0].facts[KEYS].authorized)


def test_without_root_nodes_know_one_another_by_the_users_own_files(nodes):
    one = site(nodes, ssh=Ssh(between_nodes=True))
    for target in one.targets:
        target.node.may_sudo = False
        target.node.run(["sh", "-c", "mkdir -p /root/.ssh /etc/ssh; printf theirs > /root/.ssh/known_hosts"], timeout_s=HANG_S)
        make = "cd /etc/ssh; rm -f ssh_host_* ssh_known_hosts; ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key"
        assert target.node.run(["sh", "-c", make], timeout_s=HANG_S).code == 0
        assert not any(change.script for change in SSH_KEYS.plan(one, target))
        settle(SSH_KEYS, one, target)
    for target in one.targets:
        assert not any(change.script for change in SSH_TRUST.plan(one, target))
        settle(SSH_TRUST, one, target)
        known = target.node.run(["cat", "/root/.ssh/known_hosts"], timeout_s=HANG_S).stdout
        assert known.startswith("theirs\n")
        assert all(other.facts[KEYS].hosts[0] in known for other in one.targets)
        assert target.node.run(["test", "-e", "/etc/ssh/ssh_known_hosts"], timeout_s=HANG_S).code == 1


def test_a_key_with_a_passphrase_is_kept_and_reported(nodes):
    one = site(nodes, ssh=Ssh(between_nodes=True))
    make = "mkdir -p /root/.ssh; ssh-keygen -q -t ed25519 -N secret -f /root/.ssh/id_ed25519"
    assert one.targets[0].node.run(["sh", "-c", make], timeout_s=HANG_S).code == 0
    with pytest.raises(Unanswered, match=r"w1: /root/\.ssh/id_ed25519 cannot be read without a passphrase"):
        SSH_KEYS.plan(one, one.targets[0])


def test_a_damaged_block_of_our_lines_stops_the_change(nodes):
    one = site(nodes, ssh=Ssh(between_nodes=True))
    for target in one.targets:
        settle(SSH_KEYS, one, target)
    first = one.targets[0]
    settle(SSH_TRUST, one, first)
    first.node.run(["sed", "-i", "/^# end shardlab/d", "/root/.ssh/authorized_keys"], timeout_s=HANG_S)
    first.facts.forget_answers()
    with pytest.raises(Unanswered, match="must each occur once"):
        SSH_TRUST.plan(one, first)


@pytest.mark.parametrize(
    ("prepare", "why_not"),
    [
        ("chmod 777 {0}", ""),
        ("chmod 755 {0}", "Permission denied"),
        ("mount -t tmpfs -o ro tmpfs {0}", "Read-only file system"),
        ("mount -t tmpfs -o size=16k,mode=777 tmpfs {0}", "No space left on device"),
        ("mount -t tmpfs -o nr_inodes=1,mode=777 tmpfs {0}", "No space left on device"),
    ],
)
def test_a_user_writes_a_file_to_find_out_whether_this_is_possible(nodes, prepare, why_not):
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # other users may enter it, unlike the folders of pytest
        Path(folder).chmod(0o755)
        nodes[0].run(["sh", "-euc", prepare.format(folder)], timeout_s=HANG_S)
        fact = make_write_test_query(f"{folder}{'' if why_not else '/not/there/yet'}")
        answer = nodes[0].run([*nobody, *fact.command("python3")], timeout_s=HANG_S)
        assert fact.parse(answer.stdout) == WriteTest(folder, why_not)
        assert nodes[0].run(["ls", "-A", folder], timeout_s=HANG_S).stdout == ""
