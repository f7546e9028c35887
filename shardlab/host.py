"""What a machine really is: processors, memory, GPUs, network interfaces, software; run it to get it as JSON."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from socket import gethostname

import msgspec

PACKAGES = (
    "shardlab", "torch", "torchvision", "transformers", "deepspeed", "numpy", "submitit", "fabric",
    "msgspec", "polars", "plotly",
)  # fmt: skip


class Gpu(msgspec.Struct, omit_defaults=True):
    """A GPU as NVML names it. Sizes in bytes, power in watts."""

    uuid: str
    name: str
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    pci: str | None = None


class Nic(msgspec.Struct, omit_defaults=True):
    """A network interface. kind: loopback, physical (it has a device) or virtual; speed_mbps as the driver states it."""

    name: str
    kind: str
    mac: str | None = None
    pci: str | None = None
    speed_mbps: int | None = None


class Host(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One machine at one boot. An item that could not be read is absent; `gpus` is None where NVML is not there."""

    schema: int
    host: str
    boot_id: str
    kernel: str
    system: str
    cpu_model: str | None
    cpus: int
    cpus_allowed: int  # that this process may use
    memory_bytes: int
    gpu_driver: str | None = None
    gpus: list[Gpu] | None = None
    gpu_why_absent: str | None = None
    nics: list[Nic]
    python: str
    packages: dict[str, str]


def observe() -> Host:
    """This machine, now."""
    import psutil

    driver, gpus, why = _gpus()
    return Host(
        schema=1,
        host=gethostname(),
        boot_id=boot_id(),
        kernel=platform.release(),
        system=_system(),
        cpu_model=_cpu_model(),
        cpus=os.cpu_count() or 1,
        cpus_allowed=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpu_driver=driver,
        gpus=gpus,
        gpu_why_absent=why,
        nics=nics(),
        python=platform.python_version(),
        packages=packages(),
    )


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def packages() -> dict[str, str]:
    """Versions of the installed packages that a result can depend on, without importing them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def nics(root: Path = Path("/sys/class/net")) -> list[Nic]:
    """The network interfaces that the kernel shows, by name."""
    return [_nic(folder) for folder in sorted(root.iterdir()) if (folder / "statistics").is_dir()]


def _nic(folder: Path) -> Nic:
    device = folder / "device"
    hardware = _text(folder / "type")
    kind = "loopback" if hardware == "772" else "physical" if device.exists() else "virtual"  # 772: ARPHRD_LOOPBACK
    speed = _text(folder / "speed")
    return Nic(
        name=folder.name,
        kind=kind,
        mac=_text(folder / "address") if kind != "loopback" else None,
        pci=device.resolve().name if device.exists() else None,
        speed_mbps=int(speed) if speed and speed.isdigit() and int(speed) > 0 else None,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu_model() -> str | None:
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _gpus() -> tuple[str | None, list[Gpu] | None, str | None]:
    """(driver version, GPUs, why there are none), by NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, None, f"NVML: {error}"
    try:
        return pynvml.nvmlSystemGetDriverVersion(), [_gpu(i) for i in range(pynvml.nvmlDeviceGetCount())], None
    except pynvml.NVMLError as error:
        return None, None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    gpu = Gpu(uuid=pynvml.nvmlDeviceGetUUID(handle), name=pynvml.nvmlDeviceGetName(handle))
    try:
        gpu.memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        gpu.pci = pynvml.nvmlDeviceGetPciInfo(handle).busId
        gpu.power_limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000  # NVML gives milliwatts
    except pynvml.NVMLError:
        pass  # not every GPU answers every question; what is missing stays absent
    return gpu


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(observe()) + b"\n")
