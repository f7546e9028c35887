"""One practice node: an overlay over the base, booted by systemd-nspawn with systemd as its process 1."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from provision.practice import cgroup, network, shared
from provision.practice.base import UID, USER, NoBase, run
from templates import render

STATE = Path("/var/lib/shardlab/practice")
GPUS = "/opt/gpus"  # where a node finds what Slurm takes for its GPUs
WHEELS = "/opt/wheels"  # not under the same path as here: their user may not look into root's home
SCRATCH, MARK = Path("/run/systemd/nspawn"), "shardlab-practice"  # nspawn's own, and what says that it was mounted here
LIMIT_S = 20.0
_UPPER = re.compile(r"upperdir=([^, ]+)")


@dataclass(frozen=True)
class Machine:
    """What a node is made of. folder: where all of it lies on this machine; base: the file system under its own."""

    cluster: str
    name: str
    address: str
    prefix: int  # length of the subnet's
    bridge: str
    base: Path
    authorized: str  # the public key that may log in
    shared: str | None = None
    wheelhouse: str | None = None
    gpus: int = 0
    mbps: int | None = None

    @property
    def folder(self) -> Path:
        return STATE / self.cluster / self.name

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def host_key(self) -> Path:
        return self.folder / "upper/etc/ssh/ssh_host_ed25519_key"

    def pid(self) -> int | None:
        """The pid of its process 1 on this machine, or None if it is not running."""
        return init_of(self.folder / "upper")

    def age_s(self) -> float | None:
        """The seconds since it started, 0 if it is starting, or None if it does not run."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return time.time() - psutil.Process(pid).create_time()
        return None if self._loop() is None else 0.0

    def create(self) -> None:
        """Lay out its files, mount its root and boot it. Nothing that it holds already is changed but what makes it this node.

        Raises NoBase.
        """
        self._check_base()
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._personalise()
        if not os.path.ismount(self.root):
            layers = f"lowerdir={self.base},upperdir={self.folder / 'upper'},workdir={self.folder / 'work'}"
            run(["mount", "-t", "overlay", "overlay", "-o", layers, str(self.root)])
        self.boot()

    def boot(self) -> None:
        """Start it, its root being mounted."""
        if not os.path.ismount(SCRATCH):  # or nspawn says "Attempted to remove disk file system"
            SCRATCH.mkdir(parents=True, exist_ok=True)
            run(["mount", "-t", "tmpfs", MARK, str(SCRATCH)])
        binds = [("--bind", str(self._devices()), GPUS)] if self.gpus else []
        if self.shared:
            shared.protect(STATE / self.cluster, Path(self.shared))
            binds.append(("--bind", self.shared, self.shared))
        if self.wheelhouse:
            binds.append(("--bind-ro", self.wheelhouse, WHEELS))
        script = self.folder / "boot.sh"
        # nspawn names its end of the cable after the machine, and two clusters may have nodes of one name
        machine = network.label(f"{self.cluster}/{self.name}")
        words: dict[str, Any] = {
            "root": self.root,
            "machine": machine,
            "hostname": self.name,
            "bridge": self.bridge,
            "binds": binds,
            "cgroups": cgroup.make(self.cluster, self.name),
        }
        script.write_text(render("practice/boot.sh.j2", **words), encoding="utf-8")
        with (self.folder / "boot.log").open("ab") as log:
            process = subprocess.Popen(
                ["sh", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        (self.folder / "boot.pid").write_text(str(process.pid))

    def crash(self) -> None:
        """End it like a power cut: all its processes are killed, and nothing more is written."""
        if (loop := self._loop()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(loop, signal.SIGKILL)
        ends = time.monotonic() + LIMIT_S
        while (pid := self.pid()) is not None or _lives(loop):
            if time.monotonic() > ends:
                raise NoBase(f"{self.name}: processes of this practice node do not end.")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        cgroup.remove(self.cluster, self.name)

    def remove(self) -> None:
        """End it and remove every trace of it."""
        self.crash()
        ends = time.monotonic() + LIMIT_S
        while os.path.ismount(self.root):
            answer = subprocess.run(["umount", str(self.root)], check=False, capture_output=True, text=True)
            if answer.returncode and time.monotonic() > ends:
                raise NoBase(f"{self.root}: {answer.stderr.strip()}")
            time.sleep(0 if answer.returncode == 0 else 0.1)
        shutil.rmtree(self.folder)

    def _check_base(self) -> None:
        """Raises NoBase if the node was made from another base: its own files, such as /etc/passwd, do not fit this one."""
        note = self.folder / "base"
        if not (self.folder / "upper").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            note.write_text(self.base.name, encoding="utf-8")
        elif not note.exists() or note.read_text(encoding="utf-8") != self.base.name:
            raise NoBase(
                f"{self.name}: this practice node was made by another version of shardlab; remove the nodes of "
                f"{self.cluster} with provision FILE down, and run the same command again."
            )

    def _personalise(self) -> None:
        upper = self.folder / "upper"
        etc = upper / "etc"
        (etc / "ssh").mkdir(parents=True, exist_ok=True)
        if not self.host_key.exists():
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.host_key)])
            (etc / "hostname").write_text(f"{self.name}\n")
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
            link = etc / "systemd/network/10-host0.network"  # before 80-container-host0, which asks for DHCP
            link.parent.mkdir(parents=True)
            shape = f"\n[TokenBucketFilter]\nRate={self.mbps}M\nBurstBytes=256K\nLatencySec=50ms\n" if self.mbps else ""
            link.write_text(f"[Match]\nName=host0\n\n[Network]\nAddress={self.address}/{self.prefix}\n{shape}")
        home = upper / "home" / USER
        keys = home / ".ssh/authorized_keys"
        keys.parent.mkdir(parents=True, exist_ok=True)
        keys.write_text(f"{self.authorized}\n")
        for path, mode in ((home, 0o755), (keys.parent, 0o700), (keys, 0o600)):
            os.chown(path, UID, UID)
            path.chmod(mode)

    def _devices(self) -> Path:
        """Character devices that can be opened and do nothing: Slurm wants devices to hand out, and no less."""
        folder = self.folder / "gpus"
        folder.mkdir(exist_ok=True)
        for number in range(self.gpus):
            device = folder / f"nvidia{number}"
            if not device.exists():
                os.mknod(device, 0o020666, os.makedev(1, 3))
                device.chmod(0o666)
        return folder

    def _loop(self) -> int | None:
        """The process that boots it, and boots it again; also its process group, in which nspawn ends after its process 1."""
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int((self.folder / "boot.pid").read_text())
            if str(self.folder / "boot.sh").encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None


def _lives(group: int | None) -> bool:
    """Whether a process of the group lives. A process that ended stays in the group until its parent has asked for its end."""
    if group is None:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return any(_is_of(process, group) for process in psutil.process_iter())


def _is_of(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def init_of(upper: Path) -> int | None:
    """The process 1 of the system whose root is an overlay with this upper folder.

    nspawn, its parent, sees another root; the processes of the system itself all have this one, and 1 as the last of their
    numbers only the first of them.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            numbers = re.search(r"^NSpid:(.*)$", (entry / "status").read_text(), re.MULTILINE)
            if numbers is None or numbers[1].split()[1:] != ["1"]:
                continue
            for line in (entry / "mountinfo").read_text().splitlines():
                if line.split(" ")[4] == "/" and (found := _UPPER.search(line)) and found[1] == str(upper):
                    return int(entry.name)
    return None


def machines(cluster: str) -> Sequence[Path]:
    """The folders of the nodes that this machine has of a cluster, running or not."""
    folder = STATE / cluster
    return sorted(path for path in folder.iterdir() if (path / "upper").is_dir()) if folder.is_dir() else []


def leave() -> None:
    """Remove what all nodes share, if no node of any cluster is left."""
    for folder in (STATE, STATE.parent):
        with contextlib.suppress(OSError):  # there are others, or it was never made
            folder.rmdir()
    ours = any(line.split()[:2] == [MARK, str(SCRATCH)] for line in Path("/proc/mounts").read_text().splitlines())
    if ours and not STATE.exists():
        with contextlib.suppress(NoBase, OSError):  # a container that is not ours has come to use it
            run(["umount", str(SCRATCH)])
            SCRATCH.rmdir()
