"""Reads the properties of this machine: processors, memory, GPUs, network interfaces and software.

`python -m shardlab.hardware.host` prints the properties as JSON.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import msgspec

from shardlab.hardware import nvml
from shardlab.hardware.nvml import Gpu
from shardlab.record_types import BootId, Count, HostName

RECORDED_PACKAGES = (
    "shardlab", "torch", "torchvision", "transformers", "deepspeed", "numpy", "submitit", "fabric",
    "msgspec", "polars", "plotly",
)  # fmt: skip


class Nic(msgspec.Struct, omit_defaults=True):
    """A network interface."""

    name: str
    """Name of the interface, such as eth0."""
    kind: str
    """Loopback, physical (the interface has a device) or virtual."""
    mac: str | None = None
    pci: str | None = None
    speed_mbps: Count | None = None
    """The speed that the driver reports, in Mbit/s."""
    mtu: Count | None = None
    """In bytes."""
    driver: str | None = None
    """Name of its driver."""


class NumaNode(msgspec.Struct):
    """A NUMA node.

    The size of its memory is left out, because the properties of a machine must not change, and in a virtual machine the
    balloon driver changes this size all the time.
    """

    node: Count
    """Number of the NUMA node."""
    cpus: str
    """Its processors as the kernel lists them, such as 0-15,32-47."""


class Host(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The properties of one machine during one boot. A property that could not be read is absent."""

    schema: Count
    host: HostName
    boot_id: BootId
    kernel: str
    """Release of the kernel."""
    system: str
    """Name of the distribution."""
    cpu_model: str | None
    """As the kernel names it."""
    cpus: Count
    """Number of processors."""
    cpus_allowed: Count
    """The number of processors that this process may use, by its affinity and quota."""
    memory_bytes: Count
    """Physical memory."""
    gpu_driver: str | None = None
    """Version of the driver."""
    gpus: list[Gpu] | None = None
    """None if NVML is not installed or fails; gpu_why_absent then says why."""
    gpu_why_absent: str | None = None
    """Why `gpus` is absent."""
    nics: list[Nic]
    """Network interfaces."""
    numa_nodes: list[NumaNode] | None = None
    """Null: the kernel shows none."""
    python: str
    """Version of the interpreter."""
    packages: dict[str, str]
    """Name of an installed package -> its version."""


def read_host() -> Host:
    """Read the properties of this machine."""
    import psutil

    driver_version, observed_gpus, why_absent = nvml.read_gpus()
    return Host(
        schema=1,
        host=gethostname(),
        boot_id=read_boot_id(),
        kernel=platform.release(),
        system=_read_system_name(),
        cpu_model=_read_cpu_model(),
        cpus=os.cpu_count() or 1,
        cpus_allowed=count_usable_processors(),
        memory_bytes=psutil.virtual_memory().total,
        gpu_driver=driver_version,
        gpus=observed_gpus,
        gpu_why_absent=why_absent,
        nics=list_nics(),
        numa_nodes=list_numa_nodes() or None,
        python=platform.python_version(),
        packages=read_package_versions(),
    )


def count_usable_processors(quota_path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of processors that this process may use, according to its CPU affinity and the CPU quota of its container.

    quota_path: the file in which version 2 of cgroups states the quota.
    """
    affinity_count = len(os.sched_getaffinity(0))
    try:
        allowed_us, period_us = quota_path.read_text().split()
    except OSError:  # no container, or version 1 of cgroups
        return affinity_count
    return affinity_count if allowed_us == "max" else max(1, min(affinity_count, int(allowed_us) // int(period_us)))


def read_boot_id() -> str:
    """The id that the kernel gives to this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify_this_process() -> dict[str, int | float | str]:
    """The process id, the start time (seconds since the epoch) and the boot id, which together identify this process.

    The process id alone does not identify the process, because the kernel uses the number again for later processes. If this
    process executes another program in its place (execv), all three values stay the same.
    """
    import psutil

    this_process = psutil.Process()
    return {"pid": this_process.pid, "created": this_process.create_time(), "boot_id": read_boot_id()}


def read_package_versions() -> dict[str, str]:
    """The versions of the installed packages that a result can depend on. The packages are not imported."""
    from importlib import metadata

    version_by_package = {}
    for package_name in RECORDED_PACKAGES:
        try:
            version_by_package[package_name] = metadata.version(package_name)
        except metadata.PackageNotFoundError:
            continue
    return version_by_package


def list_nics(sysfs_folder: Path = Path("/sys/class/net")) -> list[Nic]:
    """The network interfaces in sysfs, sorted by name. The list is empty in a sandbox whose sysfs has none, such as gVisor."""
    nic_folders = sorted(sysfs_folder.iterdir()) if sysfs_folder.is_dir() else []
    return [_read_interface(folder) for folder in nic_folders if (folder / "statistics").is_dir()]


def _read_interface(nic_folder: Path) -> Nic:
    device_link = nic_folder / "device"
    link_type = read_kernel_text(nic_folder / "type")
    nic_kind = "loopback" if link_type == "772" else "physical" if device_link.exists() else "virtual"  # 772: ARPHRD_LOOPBACK
    speed_text = read_kernel_text(nic_folder / "speed")
    return Nic(
        name=nic_folder.name,
        kind=nic_kind,
        mac=read_kernel_text(nic_folder / "address") if nic_kind != "loopback" else None,
        pci=device_link.resolve().name if device_link.exists() else None,
        speed_mbps=int(speed_text) if speed_text and speed_text.isdigit() and int(speed_text) > 0 else None,
        mtu=int(mtu) if (mtu := read_kernel_text(nic_folder / "mtu")) and mtu.isdigit() else None,
        driver=(device_link / "driver").resolve().name if (device_link / "driver").exists() else None,
    )


def list_numa_nodes(sysfs_folder: Path = Path("/sys/devices/system/node")) -> list[NumaNode]:
    """The NUMA nodes that the kernel shows, sorted by number; empty if the kernel shows no NUMA nodes."""
    folders = sorted(sysfs_folder.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    return [NumaNode(int(folder.name.removeprefix("node")), read_kernel_text(folder / "cpulist") or "") for folder in folders]


def read_git_commit() -> str | None:
    """The git commit of the checkout from which this code runs, with "-dirty" if tracked files were changed.

    None if this code is an installed wheel, or if git does not answer.
    """
    checkout_path = Path(__file__).parents[2]
    if not (checkout_path / ".git").exists():  # git would look in the folders above, such as a workspace of somebody else
        return None
    # fsmonitor: a command of the repository's configuration
    git_command = ["git", "-c", "core.fsmonitor=false", "-C", str(checkout_path)]
    describe_command = [*git_command, "describe", "--always", "--abbrev=40", "--dirty", "--match="]
    tracked_command = [*git_command, "ls-files", "--error-unmatch", str(Path(__file__).relative_to(checkout_path))]
    try:
        git_processes = [
            subprocess.run(git_words, capture_output=True, text=True, timeout=10, check=False)
            for git_words in (describe_command, tracked_command)
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git_processes[0].stdout.strip() or None if not any(git_process.returncode for git_process in git_processes) else None


def read_kernel_text(path: Path) -> str | None:
    """The text in a file in /proc or /sys; None if the file is empty or cannot be read."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _read_system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _read_cpu_model() -> str | None:
    for cpuinfo_line in (read_kernel_text(Path("/proc/cpuinfo")) or "").splitlines():
        if cpuinfo_line.startswith("model name"):
            return cpuinfo_line.partition(":")[2].strip()
    return None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(read_host()) + b"\n")
