"""One practice node: a container that systemd-nspawn boots from an overlay over the base, with systemd as its process 1."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from provision.practice import network, python, shared
from provision.practice.base import PRACTICE_UID, PRACTICE_USER, PracticeNodeError, run_here
from templates import render

STATE_FOLDER = Path("/var/lib/shardlab/practice")
GPU_DEVICES_FOLDER = "/opt/gpus"  # the folder on a node with the devices that Slurm hands out as GPUs
# The folder of wheels on a node; not the path on this machine, as a node's user cannot read root's home
WHEELS_FOLDER = "/opt/wheels"
NSPAWN_FOLDER, MOUNT_SOURCE = Path("/run/systemd/nspawn"), "shardlab-practice"  # nspawn's folder; our mount in /proc/mounts
CGROUP_NAME = "shardlab-practice"
LIMIT_S = 20.0
_UPPER_FOLDER = re.compile(r"upperdir=([^, ]+)")


class PracticeMachine(msgspec.Struct, frozen=True):
    """A practice node: its address, its folders, and the folders and devices of this machine that the node uses."""

    cluster: str
    name: str
    address: str
    prefix_len: int
    """The prefix length of the subnet."""
    bridge: str
    base_folder: Path
    """The folder of the base, which is the lower layer of the overlay."""
    authorized_key: str
    """The public SSH key that may log in to the node."""
    shared_folder: str | None = None
    wheelhouse: str | None = None
    python: str | None = None
    """The folder of this machine's Python, if the nodes use it."""
    has_only_cgroup2: bool = False
    """Whether the node's systemd gets only control groups of version 2, whatever this machine uses."""
    gpu_count: int = 0
    mbps: int | None = None

    @property
    def folder(self) -> Path:
        """The folder on this machine that contains all files of the node."""
        return STATE_FOLDER / self.cluster / self.name

    @property
    def root_folder(self) -> Path:
        """The folder at which the node's root file system is mounted on this machine."""
        return self.folder / "root"

    @property
    def host_key_path(self) -> Path:
        """The path of the file with the private SSH host key of the node."""
        return self.folder / "upper/etc/ssh/ssh_host_ed25519_key"

    def find_pid(self) -> int | None:
        """The PID on this machine of the node's process 1; None if the node does not run."""
        return find_init_pid(self.folder / "upper")

    def measure_age_s(self) -> float | None:
        """The time since the node was started, in seconds; 0 while its process 1 is being started; None if it does not run."""
        if (pid := self.find_pid()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return time.time() - psutil.Process(pid).create_time()
        return None if self._find_boot_process() is None else 0.0

    def create(self) -> None:
        """Make the files of the node, mount its root file system and boot it. Existing files are kept. Raises PracticeNodeError
        if the base system, which all practice nodes share, was not made yet."""
        self._check_base()
        for layer_name in ("upper", "work", "root"):
            (self.folder / layer_name).mkdir(parents=True, exist_ok=True)
        self._write_node_identity()
        if not os.path.ismount(self.root_folder):
            overlay_options = f"lowerdir={self.base_folder},upperdir={self.folder / 'upper'},workdir={self.folder / 'work'}"
            run_here(["mount", "-t", "overlay", "overlay", "-o", overlay_options, str(self.root_folder)])
        self.boot()

    def boot(self) -> None:
        """Start the node; its root file system must be mounted."""
        if not os.path.ismount(NSPAWN_FOLDER):  # without this mount, nspawn fails: "Attempted to remove disk file system"
            NSPAWN_FOLDER.mkdir(parents=True, exist_ok=True)
            run_here(["mount", "-t", "tmpfs", MOUNT_SOURCE, str(NSPAWN_FOLDER)])
        bind_mounts = [("--bind", str(self._make_devices()), GPU_DEVICES_FOLDER)] if self.gpu_count else []
        if self.shared_folder:
            shared.protect_folder(STATE_FOLDER / self.cluster, Path(self.shared_folder))
            bind_mounts.append(("--bind", self.shared_folder, self.shared_folder))
        if self.wheelhouse:
            bind_mounts.append(("--bind-ro", self.wheelhouse, WHEELS_FOLDER))
        if self.python:
            bind_mounts.append(("--bind-ro", self.python, python.PYTHON_PREFIX))
        boot_script = self.folder / "boot.sh"
        # nspawn names the node's network interface on this machine after `machine`; nodes of two clusters may have one name
        machine_name = network.make_interface_name(f"{self.cluster}/{self.name}")
        template_values: dict[str, Any] = {
            "root": self.root_folder,
            "machine": machine_name,
            "hostname": self.name,
            "bridge": self.bridge,
            "binds": bind_mounts,
            "cgroups": make_cgroups(self.cluster, self.name),
            "unified": self.has_only_cgroup2,
        }
        boot_script.write_text(render("practice/boot.sh.j2", **template_values), encoding="utf-8")
        with (self.folder / "boot.log").open("ab") as boot_log:
            boot_process = subprocess.Popen(
                ["sh", str(boot_script)],
                stdin=subprocess.DEVNULL,
                stdout=boot_log,
                stderr=boot_log,
                start_new_session=True,
                cwd="/",
            )
        (self.folder / "boot.pid").write_text(str(boot_process.pid))

    def crash(self) -> None:
        """End the node as a power cut does: kill all its processes, so that nothing more is written."""
        if (boot_pid := self._find_boot_process()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(boot_pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while (pid := self.find_pid()) is not None or _is_group_alive(boot_pid):
            if time.monotonic() > deadline:
                raise PracticeNodeError(f"{self.name}: processes of this practice node do not end.")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        remove_cgroups(self.cluster, self.name)

    def remove(self) -> None:
        """End the node and remove all its files."""
        self.crash()
        deadline = time.monotonic() + LIMIT_S
        while os.path.ismount(self.root_folder):
            umount_process = subprocess.run(["umount", str(self.root_folder)], check=False, capture_output=True, text=True)
            if umount_process.returncode and time.monotonic() > deadline:
                raise PracticeNodeError(f"{self.root_folder}: {umount_process.stderr.strip()}")
            time.sleep(0 if umount_process.returncode == 0 else 0.1)
        shutil.rmtree(self.folder)

    def _check_base(self) -> None:
        """Raises PracticeNodeError if the node was made from another base, because the node's files, such as /etc/passwd, would
        not fit this base."""
        base_note = self.folder / "base"
        if not (self.folder / "upper").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            base_note.write_text(self.base_folder.name, encoding="utf-8")
        elif not base_note.exists() or base_note.read_text(encoding="utf-8") != self.base_folder.name:
            raise PracticeNodeError(
                f"{self.name}: this practice node was made by another version of shardlab, or for another release; remove the "
                f"nodes of {self.cluster} with provision FILE down, and run the same command again."
            )

    def _write_node_identity(self) -> None:
        upper_folder = self.folder / "upper"
        etc_folder = upper_folder / "etc"
        (etc_folder / "ssh").mkdir(parents=True, exist_ok=True)
        if not self.host_key_path.exists():
            run_here(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.host_key_path)])
            (etc_folder / "hostname").write_text(f"{self.name}\n")
            (etc_folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
            # read before 80-container-host0.network, which would use DHCP
            network_path = etc_folder / "systemd/network/10-host0.network"
            network_path.parent.mkdir(parents=True)
            rate_limit = f"\n[TokenBucketFilter]\nRate={self.mbps}M\nBurstBytes=256K\nLatencySec=50ms\n" if self.mbps else ""
            network_path.write_text(f"[Match]\nName=host0\n\n[Network]\nAddress={self.address}/{self.prefix_len}\n{rate_limit}")
        user_home = upper_folder / "home" / PRACTICE_USER
        keys = user_home / ".ssh/authorized_keys"
        for path in (user_home, keys.parent, keys):
            if path.is_symlink():  # a link that a user of the node made could lead to a file of this machine
                path.unlink()
        keys.parent.mkdir(parents=True, exist_ok=True)
        authorized_lines = keys.read_text().splitlines() if keys.exists() else []  # the keys of other nodes stay in the file
        if self.authorized_key not in authorized_lines:
            keys.write_text("".join(f"{key_line}\n" for key_line in [*authorized_lines, self.authorized_key]))
        for path, file_mode in ((user_home, 0o755), (keys.parent, 0o700), (keys, 0o600)):
            os.chown(path, PRACTICE_UID, PRACTICE_UID)
            path.chmod(file_mode)

    def _make_devices(self) -> Path:
        """Make the devices in place of GPUs, which Slurm can assign to jobs: they can be opened and do nothing.

        Returns the folder of the devices on this machine.
        """
        devices_folder = self.folder / "gpus"
        devices_folder.mkdir(exist_ok=True)
        for device_number in range(self.gpu_count):
            device_path = devices_folder / f"nvidia{device_number}"
            if not device_path.exists():
                os.mknod(device_path, 0o020666, os.makedev(1, 3))
                device_path.chmod(0o666)
        return devices_folder

    def _find_boot_process(self) -> int | None:
        """The PID of the process that starts nspawn again after each reboot of the node; None if it does not run.

        This process is the leader of nspawn's process group. nspawn ends after the node's process 1.
        """
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int((self.folder / "boot.pid").read_text())
            if str(self.folder / "boot.sh").encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None


def _is_group_alive(group_id: int | None) -> bool:
    """Whether a process of a process group still runs. An ended process stays in the group until its parent has waited for it.

    group_id: the id of the process group; None: there is no group.
    """
    if group_id is None:
        return False
    try:
        os.killpg(group_id, 0)
    except ProcessLookupError:
        return False
    return any(_belongs_to_group(process, group_id) for process in psutil.process_iter())


def _belongs_to_group(process: psutil.Process, group_id: int) -> bool:
    try:
        return os.getpgid(process.pid) == group_id and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def find_init_pid(upper_folder: Path) -> int | None:
    """The PID on this machine of a node's process 1; None if the node does not run. upper_folder: the upper folder of its
    overlay.

    Processes of the node have this overlay as their root; nspawn, their parent, has another root. Of the processes of the node,
    only process 1 has the PID 1 in the innermost PID namespace.
    """
    for process_folder in Path("/proc").iterdir():
        if not process_folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            pid_match = re.search(r"^NSpid:(.*)$", (process_folder / "status").read_text(), re.MULTILINE)
            if pid_match is None or pid_match[1].split()[1:] != ["1"]:
                continue
            for mount_line in (process_folder / "mountinfo").read_text().splitlines():
                if (
                    mount_line.split(" ")[4] == "/"
                    and (upper_match := _UPPER_FOLDER.search(mount_line))
                    and upper_match[1] == str(upper_folder)
                ):
                    return int(process_folder.name)
    return None


def make_cgroups(cluster: str, node_name: str) -> Sequence[Path]:
    """The control group of a node, in each hierarchy in which its systemd groups its services. Raises PracticeNodeError.

    nspawn makes a node's group below its own group, always by the same name. Two nodes that were started from one group would
    share it: the systemd of one node would remove the group of a service that ended while the other systemd puts a process into
    it, and this process would fail with 219/CGROUP.
    """
    node_cgroups = [cgroup_root / CGROUP_NAME / cluster / node_name for cgroup_root in _list_cgroup_roots()]
    for cgroup in node_cgroups:
        try:
            cgroup.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PracticeNodeError(f"{cgroup}: cannot make the control group of a practice node: {error.strerror}.") from None
    return node_cgroups


def remove_cgroups(cluster: str, node_name: str) -> None:
    """Remove the control groups that `make_cgroups` made, and the groups below them, when no process is in them any more.

    Raises PracticeNodeError.
    """
    deadline = time.monotonic() + LIMIT_S
    for cgroup_root in _list_cgroup_roots():
        node_group = cgroup_root / CGROUP_NAME / cluster / node_name
        while node_group.exists():
            for group_path, _, _ in os.walk(node_group, topdown=False):
                with contextlib.suppress(OSError):  # fails while a process in the group is ending; the loop tries again
                    Path(group_path).rmdir()
            if time.monotonic() > deadline:
                raise PracticeNodeError(f"{node_group}: some processes in this control group do not end.")
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # raised if other nodes use the folder, or if it was never made
            node_group.parent.rmdir()


def _list_cgroup_roots() -> Sequence[Path]:
    """The folders at which control groups are mounted: version 2, and systemd's own hierarchy of version 1, if they exist."""
    root_by_kind: dict[str, Path] = {}
    for mount_line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount_folder, file_system, mount_options, *_ = mount_line.split(" ")
        if file_system == "cgroup2" or (file_system == "cgroup" and "name=systemd" in mount_options.split(",")):
            root_by_kind.setdefault(file_system, Path(mount_folder))
    return list(root_by_kind.values())


def list_machine_folders(cluster: str) -> Sequence[Path]:
    """The folders of all practice nodes of a cluster on this machine, whether they run or not."""
    cluster_folder = STATE_FOLDER / cluster
    return sorted(path for path in cluster_folder.iterdir() if (path / "upper").is_dir()) if cluster_folder.is_dir() else []


def remove_unused_folders() -> None:
    """Remove the folders and the mount that all practice nodes share, if no node of any cluster is left.

    The caller holds the lock of `base.hold_practice_lock`: another cluster may be making its first node in these folders.
    """
    for folder in (*(root / CGROUP_NAME for root in _list_cgroup_roots()), STATE_FOLDER, STATE_FOLDER.parent):
        with contextlib.suppress(OSError):  # raised if the folder contains other nodes, or if it was never made
            folder.rmdir()
    has_mount = any(
        line.split()[:2] == [MOUNT_SOURCE, str(NSPAWN_FOLDER)] for line in Path("/proc/mounts").read_text().splitlines()
    )
    if has_mount and not STATE_FOLDER.exists():
        with contextlib.suppress(PracticeNodeError, OSError):  # another container may use the mount now
            run_here(["umount", str(NSPAWN_FOLDER)])
            NSPAWN_FOLDER.rmdir()
