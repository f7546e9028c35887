"""Tests of disks, shared storage and free space, as data: answers of nodes lead to commands; a second plan has no changes."""

import os
import re
import struct
import subprocess

import msgspec
import pytest
from support_e2e import HANG_S

from provision import software
from provision.fact import Unanswered
from provision.facts import disk, mounts, write_test
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.exports import EXPORTED_BY_US, EXPORTS
from provision.facts.exports import parse as parse_exports
from provision.facts.files import FILES
from provision.facts.mounts import NFS_MOUNTS, Mount, MountPlace
from provision.facts.packages import PACKAGES, Packages
from provision.facts.room import FreeSpace, make_free_space_query
from provision.facts.room import parse as parse_room
from provision.facts.services import SERVICES, Service
from provision.facts.write_test import WriteTest
from provision.nodes.local_node import LocalNode
from provision.operation import Nothing, Site, Target, failure_reason
from provision.operations import disks, environment, fstab, nfs, packages, space, workspaces
from shardlab.cluster.cluster_keys import Storage
from shardlab.remote.remote import CommandOutput
from tests.provision.operations.test_operations import A_MACHINE, RUNNING, commands, site, with_files

DISK, MOUNT, SHARED = "/dev/nvme1n1", "/mydata", "/mydata/bench"
LSBLK = '{"blockdevices": [{"path":"/dev/nvme1n1","type":"disk","mountpoints":[null]%s}]}'
SAID = '{"there": true, "tree": %s, "signs": "%s", "held": "%s", "blank": %s, "made": %s}'


def with_storage(storage: Storage, provider: str = "ssh", **keys_) -> Site:
    one = site()
    return Site(msgspec.structs.replace(one.cluster, storage=storage, provider=provider, **keys_), None, one.targets)


def with_place(target: Target, path: str, found: MountPlace) -> None:
    target.facts.answers[f"place {path}"] = found


# Tests of disks.

ON_DISK = Storage(disk=DISK, mount=MOUNT)
EMPTY = disk.Disk(DISK)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ('{"there": false}', disk.Disk()),
        (SAID % (LSBLK % "", "", "", "true", "false"), EMPTY),
        (SAID % (LSBLK % "", "ext4", "", "false", "true"), disk.Disk(DISK, ("a signature of ext4",), ours=True)),
        (SAID % (LSBLK % "", "ext4", "", "false", "false"), disk.Disk(DISK, ("a signature of ext4",))),
        (SAID % (LSBLK % "", "", "", "false", "false"), disk.Disk(DISK, ("data of no known kind in its first MiB",))),
        (
            SAID % (LSBLK.replace("[null]", '["/", "/home"]') % "", "ext4", "", "false", "true"),
            disk.Disk(DISK, ("it is in use at /", "it is in use at /home", "a signature of ext4")),
        ),
        (
            SAID % (LSBLK % ',"children":[{"path":"/dev/nvme1n1p1","type":"part"}]', "gpt PMBR", "md0", "false", "false"),
            disk.Disk(
                DISK, ("the part /dev/nvme1n1p1", "a signature of gpt", "a signature of PMBR", "it is used by md0")
            ),
        ),
        (
            SAID % (LSBLK.replace('"disk"', '"part"') % "", "", "", "true", "false"),
            disk.Disk(DISK, ("it is not a whole disk but a part",)),
        ),
    ],
)  # fmt: skip
def test_the_content_of_a_disk_is_parsed(said, found):
    assert disk.parse(said) == found


@pytest.mark.parametrize("said", ["", "lsblk: not found", '{"there": true}', SAID % ("{}", "", "", "true", "false")])
def test_a_disk_that_does_not_answer_is_not_taken_for_an_empty_one(said):
    with pytest.raises(ValueError, match=r".+"):
        disk.parse(said)


def planned(storage: Storage, place: MountPlace, found: disk.Disk | None = None):
    one = with_storage(storage)
    w1 = one.targets[1]
    with_place(w1, MOUNT, place)
    w1.facts.answers[f"disk {DISK}"] = found
    return disks.plan(one, w1)


def test_an_empty_disk_is_looked_at_again_made_and_mounted_by_its_uuid():
    make, entry, folder, mount = commands(planned(ON_DISK, MountPlace(there=False), EMPTY))
    for word in ("wipefs --no-act", "lsblk", "cmp -s", "setsid --wait mkfs.ext4 -q -L shardlab -- /dev/nvme1n1"):
        assert word in make
    assert make.index("cmp -s") < make.index("mkfs.ext4")
    assert "UUID=$(blkid --probe --match-tag UUID --output value -- /dev/nvme1n1) /mydata ext4 defaults,nofail 0 2" in entry
    assert (folder, mount) == ("mkdir -p -- /mydata", "mount -- /mydata")


def test_a_mounted_disk_needs_no_change_also_under_another_name():
    there = MountPlace(
        mount=Mount("/dev/nvme0n1", "ext4", ("rw",)), fstab=Mount("UUID=1-2", "ext4", ("defaults",)), empty=False
    )
    assert planned(ON_DISK, there) == Nothing("/dev/nvme0n1 is mounted at /mydata")
    assert planned(Storage(), there) == Nothing("cluster.yaml names no storage.disk")


def test_an_interrupted_set_up_of_a_disk_continues_without_a_new_format():
    """After a kill, the next plan continues: it does not format a disk again, and makes the missing line in fstab and mount."""
    made = disk.Disk(DISK, ("a signature of ext4",), ours=True)
    entry, _, _ = commands(planned(ON_DISK, MountPlace(), made))
    assert "mkfs" not in entry
    assert commands(planned(ON_DISK, MountPlace(fstab=Mount("UUID=1-2", "ext4", ("defaults",))))) == [
        "mkdir -p -- /mydata",
        "mount -- /mydata",
    ]
    (entry,) = commands(planned(ON_DISK, MountPlace(mount=Mount(DISK, "ext4", ()), empty=False), made))
    assert "/etc/fstab" in entry


@pytest.mark.parametrize(
    ("place", "found", "says"),
    [
        (
            MountPlace(),
            disk.Disk(DISK, ("the part /dev/nvme1n1p1",)),
            "is not empty and was not changed: the part /dev/nvme1n1p1",
        ),
        (MountPlace(), disk.Disk(), "there is no disk /dev/nvme1n1"),
        (MountPlace(empty=False), EMPTY, "contains files that a mount would hide"),
        (MountPlace(fstab=Mount("/dev/sdb1", "xfs", ())), EMPTY, "/etc/fstab already lists /dev/sdb1 for /mydata"),
        (MountPlace(mount=Mount("/dev/sdb1", "xfs", ()), empty=False), EMPTY, "/dev/sdb1 is mounted at /mydata"),
        (MountPlace(hangs=True, mount=Mount("head:/x", "nfs4", ())), EMPTY, r"w1: /mydata \(head:/x\) does not answer"),
    ],
)
def test_a_disk_that_is_not_plainly_empty_is_refused(place, found, says):
    with pytest.raises(Unanswered, match=says):
        planned(ON_DISK, place, found)


# Tests of shared storage.

SHARES = Storage(shared=SHARED, server="head")
SERVES = {**RUNNING, "nfs-server": Service("active", True, 1.0)}


def test_the_kernels_exports_are_read():
    said = "/mydata/bench\t10.0.0.3(rw,sync,anonuid=65534)\n/mydata/bench\t10.0.0.2(rw,sync)\n/other\t*(ro)\n"
    assert parse_exports(said) == {"/mydata/bench": ["10.0.0.2", "10.0.0.3"], "/other": ["*"]}


def test_nfs_packages_differ_between_server_and_clients():
    one = with_storage(SHARES)
    head, w1, _ = one.targets
    assert "nfs-kernel-server" in packages.list_needed_packages(one, head)
    assert "nfs-common" not in packages.list_needed_packages(one, head)
    assert "nfs-common" in packages.list_needed_packages(one, w1)
    assert not [name for name in packages.list_needed_packages(with_storage(SHARES, "virtual"), w1) if "nfs" in name]


def test_the_server_exports_only_to_the_other_nodes_and_then_nothing_changes():
    one = with_storage(SHARES)
    head = one.targets[0]
    with_place(head, SHARED, MountPlace(there=False))
    head.facts.answers[EXPORTS.name] = {}
    changes = nfs.plan_nfs_server(one, head)
    assert [change.description for change in changes] == [
        "make the folder /mydata/bench",
        "start the NFS server, now and at every boot",
        "make the folder for our exports",
        "export /mydata/bench to 10.0.0.2, 10.0.0.3",
        "make the server read its exports",
    ]
    options = "(rw,sync,no_subtree_check,no_root_squash)"
    assert changes[3].content.decode().splitlines()[1] == f"/mydata/bench 10.0.0.2{options} 10.0.0.3{options}"
    with_place(head, SHARED, MountPlace())
    head.facts.answers |= {EXPORTS.name: {SHARED: ["10.0.0.2", "10.0.0.3"]}, SERVICES.name: SERVES}
    with_files(head, {nfs.EXPORTS_FILE: (nfs.render_exports(one, head), 0o644, "root:root")})
    assert nfs.plan_nfs_server(one, head) == Nothing("/mydata/bench is exported to 2 nodes")
    # the state is now as if `provision` had been killed after it wrote the file and before NFS read the file
    head.facts.answers[EXPORTS.name] = {}
    assert commands(nfs.plan_nfs_server(one, head)) == ["exportfs -ra"]
    assert nfs.plan_nfs_server(one, one.targets[1]) == Nothing("it is not storage.server")


def test_the_folder_is_made_on_its_mount_or_not_at_all():
    """Before the shared folder is made, a change checks that its disk is mounted, and fails if it is not."""
    one = with_storage(Storage(shared=SHARED, server="head", disk=DISK, mount=MOUNT))
    head = one.targets[0]
    with_place(head, SHARED, MountPlace(there=False))
    head.facts.answers[EXPORTS.name] = {}
    guard, make, *_ = nfs.plan_nfs_server(one, head)
    assert guard.description == "check that /mydata is mounted"
    assert "install -d -o alice -- /mydata/bench" in make.command
    answer = LocalNode().run(["sh", "-euc", guard.argv[-1].replace(MOUNT, "/proc")], timeout_s=HANG_S)
    assert answer.code == 0
    answer = LocalNode().run(["sh", "-euc", guard.argv[-1].replace(MOUNT, "/proc/nonesuch")], timeout_s=HANG_S)
    assert answer.code != 0
    assert "it is not mounted, so nothing is written there" in answer.stderr


def test_the_environment_is_not_made_below_a_mount_that_is_missing():
    one = with_storage(Storage(shared=SHARED, server="w1"))
    first = environment.plan(one, one.targets[0])[0]
    assert first.description == "check that /mydata/bench is mounted"
    assert fstab.make_mount_checks(with_storage(Storage(shared=SHARED), "virtual"), one.targets[0]) == []


@pytest.mark.parametrize("may_sudo", [True, False])
def test_the_node_says_whether_root_checks_its_mounts(may_sudo):
    """`may_sudo` of the node decides, and not the key `ssh.sudo`: on the login node of a site, the user never has sudo."""
    one = with_storage(Storage(shared=SHARED, server="w1"))
    one.targets[0].node.may_sudo = may_sudo
    (check,) = fstab.make_mount_checks(one, one.targets[0])
    assert (check.root, bool(check.script)) == (may_sudo, may_sudo)


def test_nodes_that_share_no_folder_each_get_a_folder_of_workspaces():
    one = with_storage(Storage(disk=DISK, mount=MOUNT))
    assert workspaces.plan(one, one.targets[1]) == Nothing("cluster.yaml names no storage.shared")
    one = msgspec.structs.replace(one, cluster=msgspec.structs.replace(one.cluster, slurm=None))
    for target in one.targets:
        with_place(target, "/mydata/workspaces", MountPlace(there=False))
        guard, make = workspaces.plan(one, target)
        assert guard.description == "check that /mydata is mounted"
        assert make.command == "install -d -o alice -- /mydata/workspaces"
        with_place(target, "/mydata/workspaces", MountPlace())
        with_write_test(target, "/mydata/workspaces", WriteTest("/mydata/workspaces"))
        assert workspaces.plan(one, target) == Nothing("alice can write to /mydata/workspaces")


def with_write_test(target: Target, path: str, test: WriteTest) -> None:
    target.facts.answers[f"write test {path}"] = test


@pytest.mark.parametrize(
    ("why_not", "advice"),
    [
        ("Read-only file system", "mount it so that it can be written"),
        ("Disk quota exceeded", "ask for a larger quota, or set storage.shared to another folder"),
        ("No space left on device", "set storage.shared to a folder on a larger disk"),
        ("Permission denied", "make this user its owner"),
        ("Stale file handle", "make this user its owner"),
    ],
)
def test_a_shared_folder_that_the_user_cannot_write_is_refused(why_not, advice):
    one = with_storage(Storage(shared=SHARED))
    with_write_test(one.targets[1], SHARED, WriteTest(SHARED, why_not))
    with pytest.raises(Unanswered, match=rf"^w1: alice cannot write to {SHARED}: {why_not}; .*{re.escape(advice)}"):
        workspaces.plan(one, one.targets[1])


def test_a_shared_folder_is_tested_when_it_is_mounted_and_not_before():
    """The facts of this test have no answer for the write test before the mount: asking for it would raise an error."""
    one = with_storage(Storage(shared=SHARED, server="w1"))
    head, server, client = one.targets
    with_place(server, SHARED, MountPlace(there=False))
    for target in (head, client):
        with_place(target, SHARED, MountPlace())
    for target in one.targets:
        planned = workspaces.plan(one, target)
        assert planned == Nothing(f"{SHARED} is made by another operation, and tested then")
    with_place(client, SHARED, MountPlace(mount=Mount(f"w1:{SHARED}", "nfs4", ("rw",))))
    with_write_test(client, SHARED, WriteTest(SHARED, "Permission denied"))
    with pytest.raises(Unanswered, match="Permission denied"):
        workspaces.plan(one, client)


@pytest.mark.parametrize(
    ("printed", "test"),
    [
        ("/mydata\n", WriteTest("/mydata")),
        (
            "/mydata\nhead: error writing '/mydata: x/f': No space left on device\n",
            WriteTest("/mydata", "No space left on device"),
        ),
    ],
)
def test_the_answer_of_a_write_test_is_read(printed, test):
    assert write_test.parse(printed) == test


@pytest.mark.parametrize("printed", ["", "sh: not found\n"])
def test_a_write_test_that_does_not_answer_is_not_taken_for_success(printed):
    with pytest.raises(ValueError, match="does not name the folder"):
        write_test.parse(printed)


def test_the_second_look_at_a_disk_finds_data_at_its_end(tmp_path):
    """Runs the real command on a file. `lsblk` is a stand-in, because the real one does not accept a file."""
    lsblk = tmp_path / "lsblk"
    lsblk.write_text("#!/bin/sh\necho /dev/x\n")
    lsblk.chmod(0o755)
    image = tmp_path / "image"
    with image.open("wb") as handle:
        handle.truncate(8 * 2**20)

    def looks_empty() -> bool:
        look = ["sh", "-euc", disks.CHECK_EMPTY.format(disk=image)]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        return subprocess.run(look, env=environment, check=False, capture_output=True).returncode == 0

    assert looks_empty()
    with image.open("r+b") as handle:  # writes the signature of a RAID member, format 0.90
        handle.seek(8 * 2**20 - 65536)
        handle.write(struct.pack("<3I", 0xA92B4EFC, 0, 90))
    assert not looks_empty()


def test_workers_mount_the_servers_folder_and_then_nothing_changes():
    """Workers mount the folder of the server by NFS. If it is mounted, the plan has no changes."""
    one = with_storage(SHARES)
    head, w1, _ = one.targets
    with_place(w1, SHARED, MountPlace(there=False))
    entry, folder, mount = commands(nfs.plan_nfs_mount(one, w1))
    assert "head:/mydata/bench /mydata/bench nfs hard,vers=4.2,_netdev 0 0" in entry
    assert (folder, mount) == ("mkdir -p -- /mydata/bench", "mount -- /mydata/bench")
    source = "head:/mydata/bench"
    wanted = Mount(source, "nfs", ("hard", "vers=4.2", "_netdev"))
    there = Mount(source, "nfs4", ("rw", "relatime", "vers=4.2", "hard", "proto=tcp"))
    with_place(w1, SHARED, MountPlace(mount=there, fstab=wanted, empty=False))
    assert nfs.plan_nfs_mount(one, w1) == Nothing("head:/mydata/bench is mounted")
    with_place(w1, SHARED, MountPlace(fstab=wanted))
    assert commands(nfs.plan_nfs_mount(one, w1))[-1] == "mount -- /mydata/bench"
    assert nfs.plan_nfs_mount(one, head) == Nothing("it is the server of the folder")
    one.skipped["head"] = "packages failed"
    assert "cannot be asked" in nfs.plan_nfs_mount(one, w1).why


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            MountPlace(hangs=True, mount=Mount("head:/mydata/bench", "nfs4", ())),
            r"w1: /mydata/bench \(head:/mydata/bench\) does",
        ),
        (MountPlace(mount=Mount("old:/x", "nfs4", ()), empty=False), "w1: it mounts old:/x at /mydata/bench"),
        (MountPlace(fstab=Mount("old:/x", "nfs", ())), "w1: it lists in /etc/fstab old:/x at /mydata/bench"),
        (MountPlace(mount=Mount("head:/mydata/bench", "nfs4", ("soft", "vers=4.2"))), "is mounted with soft,vers=4.2"),
        (MountPlace(empty=False), "contains files that a mount would hide"),
    ],
)
def test_a_wrong_mount_is_reported_with_its_node(place, says):
    one = with_storage(SHARES)
    with_place(one.targets[1], SHARED, place)
    with pytest.raises(Unanswered, match=says):
        nfs.plan_nfs_mount(one, one.targets[1])


def test_without_an_nfs_server_the_shared_folder_is_expected_with_a_remark():
    one = with_storage(Storage(shared=SHARED))
    w1 = one.targets[1]
    with_place(w1, SHARED, MountPlace())
    assert nfs.plan_nfs_mount(one, w1) == Nothing("/mydata/bench exists, as required without storage.server")
    with_place(w1, SHARED, MountPlace(there=False))
    with pytest.raises(Unanswered, match=r"w1: /mydata/bench does not exist: without storage\.server"):
        nfs.plan_nfs_mount(one, w1)


def test_practice_nodes_have_the_shared_folder_without_a_change():
    one = with_storage(SHARES, "virtual")
    for target in one.targets:
        for plan in (nfs.plan_nfs_server, nfs.plan_nfs_mount):
            assert plan(one, target) == Nothing("practice nodes share the folder of this machine")


def test_a_client_that_could_end_a_line_is_refused():
    one = with_storage(SHARES)
    one.targets[1].node.host = "10.0.0.2(rw) *"
    with pytest.raises(Unanswered, match=r"is not allowed in /etc/exports\.d"):
        nfs.render_exports(one, one.targets[0])


def test_the_mount_at_a_path_of_this_machine_is_read(tmp_path):
    def asked(path: str) -> MountPlace:
        answer = LocalNode().run(mounts.make_mount_query(path).command(""), timeout_s=HANG_S)
        assert answer.code == 0, answer.stderr
        return mounts.parse(answer.stdout)

    proc = asked("/proc")
    assert proc.mount is not None
    assert (proc.mount.kind, proc.empty, proc.hangs) == ("proc", False, False)
    assert asked(str(tmp_path)) == MountPlace()
    (tmp_path / "file").write_text("")
    assert asked(str(tmp_path)) == MountPlace(empty=False)
    assert asked(str(tmp_path / "nonesuch")) == MountPlace(there=False, empty=False)
    with pytest.raises(ValueError, match="does not say whether the folder answers"):
        mounts.parse("")
    assert mounts.parse("mount a:/b nfs4 rw,hard\nfstab a:/b nfs hard\nhangs\n").hangs


def test_an_obsolete_export_is_withdrawn_once_no_node_mounts_it():
    one = with_storage(SHARES)
    head, w1, w2 = one.targets
    with_files(w1, {nfs.EXPORTS_FILE: (b"/old 10.0.0.1(rw) 10.0.0.3(rw)\n", 0o644, "root:root")})
    w1.facts.answers[EXPORTED_BY_US.name] = EXPORTED_BY_US.parse("/old\n")
    for target in (head, w1):
        target.facts.answers[NFS_MOUNTS.name] = {}
    w2.facts.answers[NFS_MOUNTS.name] = NFS_MOUNTS.parse("nas:/home /home\nw1:/old /mnt/old\n")
    with pytest.raises(Unanswered, match=r"w1: it exports /old, which .* names, .* mounted on w2 at /mnt/old: unmount"):
        nfs.plan_nfs_server(one, w1)
    w2.facts.answers[NFS_MOUNTS.name] = NFS_MOUNTS.parse("nas:/home /home\n")
    (withdraw,) = nfs.plan_nfs_server(one, w1)
    assert withdraw.description == "withdraw the export of /old, which the cluster file no longer names"
    assert f"rm -f -- {nfs.EXPORTS_FILE}" in withdraw.command
    assert "exportfs -ra" in withdraw.command
    w1.facts.answers[FILES.name] = {}
    assert nfs.plan_nfs_server(one, w1) == Nothing("it is not storage.server")
    without = with_storage(Storage())  # the same is done if the cluster file names no storage any more
    with_files(without.targets[0], {nfs.EXPORTS_FILE: (b"", 0o644, "root:root")})
    for target in without.targets:
        target.facts.answers |= {EXPORTED_BY_US.name: ["/old"], NFS_MOUNTS.name: {}}
    assert len(nfs.plan_nfs_server(without, without.targets[0])) == 1
    practice = msgspec.structs.replace(without.cluster, provider="virtual")
    assert isinstance(nfs.plan_nfs_server(Site(practice, None, without.targets), without.targets[0]), Nothing)


def test_our_nfs_exports_are_read_from_our_exports_file(tmp_path):
    file = tmp_path / "exports"
    file.write_bytes(nfs.render_exports(with_storage(SHARES), with_storage(SHARES).targets[0]))
    answer = LocalNode().run([*EXPORTED_BY_US.command("")[:-1], str(file)], timeout_s=HANG_S)
    assert EXPORTED_BY_US.parse(answer.stdout) == [SHARED]
    assert NFS_MOUNTS.parse(LocalNode().run(NFS_MOUNTS.command(""), timeout_s=HANG_S).stdout) == {}


# Tests of free space.

DONE = {
    PACKAGES.name: Packages(dict.fromkeys(packages.ALL_PACKAGES, "1"), interrupted=False),
    ENVIRONMENT.name: InstalledEnvironment(packages=software.compute_packages_digest()),
}
LARGE = FreeSpace(10**12, 10**7, "/")
HERE = "/opt/shardlab/python-x"  # the folder of the nodes' Python environment


def with_room(one: Site, **rooms: FreeSpace) -> Site:
    """Sets the free space of / and of the file system for the Python environment, on all nodes."""
    for target in one.targets:
        target.facts.answers |= {
            make_free_space_query("/").name: rooms.get("root", LARGE),
            make_free_space_query(HERE).name: rooms.get("environment", rooms.get("root", LARGE)),
        }
    return one


@pytest.mark.parametrize(
    ("free", "inodes", "says"),
    [
        (
            2**30,
            10**7,
            "w2: 1.0 GiB are free on /, and packages and the Python environment may take 14 GiB; nothing was",
        ),
        (10**12, 1000, "w2: 1000 inodes are free on /, and packages and the Python environment may take 90000; nothing was"),
    ],
)
def test_too_little_room_is_refused_before_anything_is_changed(free, inodes, says):
    one = with_room(site(), root=FreeSpace(free, inodes, "/"))
    with pytest.raises(Unanswered, match=says):
        space.plan(one, one.targets[2])
    one.targets[2].facts.answers |= DONE  # packages that are already installed need no more space
    assert space.plan(one, one.targets[2]) == Nothing("nothing large will be installed on it")


@pytest.mark.parametrize(("codename", "version"), [("jammy", "3.10"), ("focal", "3.8"), ("bullseye", "3.9")])
def test_a_release_whose_python_is_too_old_is_refused_before_anything_is_changed(codename, version):
    one = with_room(
        site(system=msgspec.structs.replace(A_MACHINE, codename=codename, pretty="Old 1")), root=FreeSpace(2**50, 10**9, "/")
    )
    one.targets[2].facts.answers |= DONE
    with pytest.raises(
        Unanswered, match=f"w2: Old 1 has Python {version}, and shardlab needs 3.11 or newer; nothing was installed"
    ):
        space.plan(one, one.targets[2])
    one.targets[2].node.venv_python = "/opt/python/bin/python3"
    assert isinstance(space.plan(one, one.targets[2]), Nothing)


def test_only_packages_to_be_installed_need_free_space():
    """The required free space counts only what will be installed on this file system."""
    one = with_room(site(shared="/mydata"), root=FreeSpace(3 * 2**30, 0, "/"))
    assert space.plan(one, one.targets[2]) == Nothing("3.0 GiB are free on /, and packages may take 2 GiB")
    one = with_room(site(), root=FreeSpace(5 * 2**30, 10**7, "/"))
    one.targets[2].node.wheelhouse = "/opt/wheels"
    assert "may take 4 GiB" in space.plan(one, one.targets[2]).why


def test_each_file_system_needs_its_own_free_space():
    one = with_room(site(), root=FreeSpace(3 * 2**30, 10**7, "/"), environment=FreeSpace(13 * 2**30, 10**7, "/opt"))
    assert space.plan(one, one.targets[2]).why == (
        "3.0 GiB are free on /, and packages may take 2 GiB; 13.0 GiB are free on /opt, and the Python environment may take "
        "12 GiB"
    )


def test_free_space_of_shared_storage_is_checked_on_the_server():
    small = FreeSpace(2**30, 10**7, SHARED)
    says = "1.0 GiB are free on /mydata/bench, and the Python environment may take 12 GiB; nothing was installed"
    for storage, holder in ((Storage(shared=SHARED, server="w1"), 1), (Storage(shared=SHARED), 0)):
        one = with_room(with_storage(storage), environment=small)
        for number, target in enumerate(one.targets):
            if number == holder:
                with pytest.raises(Unanswered, match=f"{target.node.name}: {says}"):
                    space.plan(one, target)
            else:
                assert "environment" not in space.plan(one, target).why
    one = with_room(with_storage(Storage(shared=SHARED, disk=DISK, mount=MOUNT)), environment=small)
    # the environment will be on an empty disk that is not mounted yet, so the free space there now does not matter
    with_place(one.targets[0], MOUNT, MountPlace())
    assert "environment" not in space.plan(one, one.targets[0]).why
    with_place(one.targets[0], MOUNT, MountPlace(mount=Mount(DISK, "ext4", ())))
    with pytest.raises(Unanswered, match="GiB are free on /mydata/bench"):
        space.plan(one, one.targets[0])


def test_the_free_space_of_a_future_folder_is_read_from_its_parent(tmp_path):
    answer = LocalNode().run(make_free_space_query(str(tmp_path / "not" / "yet")).command(""), timeout_s=HANG_S)
    found = parse_room(answer.stdout)
    usage = os.statvfs(tmp_path)
    assert found.free_bytes == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.1)
    assert os.path.ismount(found.mount)
    assert parse_room("  12 - /a b\n") == FreeSpace(12, 0, "/a b")


@pytest.mark.parametrize(
    "said",
    [
        "dpkg: error processing archive x.deb (--unpack):\n cannot copy: failed to write (No space left on device)\n",
        "E: You don't have enough free space in /var/cache/apt/archives/.\n",
    ],
)
def test_a_full_disk_is_reported_for_every_last_line_of_the_output(said):
    found = failure_reason(CommandOutput(100, "", f"{said}E: Sub-process /usr/bin/dpkg returned an error code (1)\n"))
    assert found.startswith("a disk is full: ")
    assert found.endswith("; free some space on it and run the same command again")
    assert failure_reason(CommandOutput(1, "", "one\ntwo\n")) == "two"
