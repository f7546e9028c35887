"""Installs NVIDIA's driver if the cluster file requests GPUs. All parts have one version; the kernel modules fit the GPUs.

A driver from another source is not changed if it works and is new enough for the pinned torch. The installed packages are
Ubuntu's own (sources nvidia-graphics-drivers-580-server and fabric-manager-580, in jammy and noble).
"""

from __future__ import annotations

import re

from provision import gpu_generations
from provision.fact import Unanswered
from provision.facts.files import FILES
from provision.facts.nodes import NODES
from provision.facts.nvidia import NVIDIA, Nvidia
from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.facts.wheels import torch_of
from provision.gpu_generations import Generation
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write, shell
from provision.operations.packages import install
from provision.operations.reboot import Reboot
from provision.operations.service import running
from templates import render

NOUVEAU = "/etc/modprobe.d/shardlab-nouveau.conf"
PERSISTENCE = "/etc/systemd/system/nvidia-persistenced.service.d/shardlab.conf"
# Packages of the driver and the kernel, which apt must not upgrade: if the library is newer than the loaded module, every job
# fails until a reboot.
KEPT = r"^((lib)?nvidia-.*[0-9]{3}(-|$)|linux-(generic|virtual|image|headers)(-|$))"
LIST = "dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' | sed -n 's/^.i  *//p'"
HOLD = f"{LIST} | grep -E '{KEPT}' | xargs apt-mark hold"
BUSY = ("alloc", "mix", "comp", "drng")  # states of a node with running jobs; drng: it is drained, but its jobs still run
_OWN = re.compile(r"^nvidia-(?:headless|headless-no-dkms|driver)-(\d{3})-server(?:-open)?\Z")
# Packages that must not be mixed with Ubuntu's -server packages: Ubuntu's desktop drivers, and NVIDIA's own packages.
_FOREIGN = re.compile(r"^(cuda-drivers|nvidia-open|nvidia-driver$|nvidia-(driver|dkms|headless)-\d{3}(-open)?$)")


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Install the driver, or build its kernel module, and reboot if needed.

    Raises Unanswered, before anything is changed, if the GPUs cannot be supported.
    """
    name = target.node.name
    asked = site.cluster.gpus.per_node if site.cluster.gpus else 0
    if target.facts[SYSTEM].is_container:
        return Nothing("it is a container, which uses the kernel and the driver of its host")
    if not asked or not target.has("worker"):
        return Nothing("the cluster file requests no GPUs for it")
    nvidia = target.facts[NVIDIA]
    if not nvidia.gpus:
        raise Unanswered(f"{name}: the cluster file requests {asked} GPUs, but its PCI bus has no NVIDIA GPU")
    cuda = _cuda(target)
    known = _known(name, nvidia)
    if (why := gpu_generations.unserved(known, target.facts[SYSTEM].arch, cuda)) is not None:
        raise Unanswered(f"{name}: {why}")
    if parted := sum(gpu.mig is True for gpu in nvidia.seen):
        raise Unanswered(
            f"{name}: MIG divides {parted} of its GPUs, but runs need whole GPUs: sudo nvidia-smi -mig 0, then reboot"
        )
    serves = nvidia.works and _branch(nvidia) >= gpu_generations.oldest_driver(cuda)
    told = f"driver {nvidia.nvml} works with {len(nvidia.seen)} GPUs"
    if serves and not target.node.may_sudo:
        return Nothing(f"{told}; without root, it is not changed")
    if serves and _own(target) is None:
        return Nothing(f"{told}; it came from another source and is not changed")
    changes = _fabric(target, nvidia) if serves else _driver(target, nvidia, known, cuda)
    if changes or any(re.match(KEPT, name) and name not in nvidia.held for name in target.facts[PACKAGES].versions):
        changes.append(shell("keep the driver and the kernel at their versions (apt-mark hold)", HOLD))
    changes += _without_nouveau(target, nvidia)
    changes += _services(target, nvidia) if serves else [Reboot(_reboot(site, name, nvidia))]
    return changes or Nothing(told)


def _cuda(target: Target) -> str:
    """The CUDA release of the torch that this node will get. Raises Unanswered."""
    folder = target.node.wheelhouse
    cuda = target.facts[torch_of(folder)] if folder else gpu_generations.USUAL_CUDA
    if cuda is None:
        raise Unanswered(f"{target.node.name}: the torch in {folder} is built without CUDA; replace it by a build with CUDA")
    return cuda


def _known(name: str, nvidia: Nvidia) -> list[Generation]:
    kinds = {gpu.device: gpu_generations.of(gpu.device) for gpu in nvidia.gpus}
    strange = ", ".join(f"10de:{device:04x}" for device, generation in kinds.items() if generation is None)
    if strange:
        raise Unanswered(f"{name}: the driver for the GPU {strange} is not known: it is no GPU from Kepler to Blackwell")
    return [generation for generation in kinds.values() if generation is not None]


def _own(target: Target) -> str | None:
    """The name of Ubuntu's package with the driver that is installed on the node; None if no such package is installed."""
    return next((name for name in target.facts[PACKAGES].versions if _OWN.match(name)), None)


def _branch(nvidia: Nvidia) -> int:
    return int(nvidia.nvml.partition(".")[0]) if nvidia.nvml else 0


def _fabric(target: Target, nvidia: Nvidia) -> list[Change]:
    """Install the fabric manager in the driver's version if the GPUs are connected by NVSwitches: without it, no GPU works."""
    package = f"nvidia-fabricmanager-{_branch(nvidia)}"
    there = target.facts[PACKAGES].versions.get(package, "")
    if not nvidia.switches or there.startswith(f"{nvidia.nvml}-"):
        return []
    return install([f"{package}={nvidia.nvml}-*"], "--allow-change-held-packages")


def _driver(target: Target, nvidia: Nvidia, known: list[Generation], cuda: str) -> list[Change]:
    name, versions, system = target.node.name, target.facts[PACKAGES].versions, target.facts[SYSTEM]
    own = _own(target)
    state = f"its driver does not work with torch for CUDA {cuda} ({nvidia.versions})"
    if system.id != "ubuntu":
        why = f"shardlab installs drivers on Ubuntu only, and {system.pretty} has no driver of branch {gpu_generations.BRANCH}"
        raise Unanswered(f"{name}: {state}; {why}: install NVIDIA's driver by hand and try again")
    foreign = ", ".join(sorted(package for package in versions if _FOREIGN.match(package)))
    if foreign or (nvidia.module is not None and own is None):
        whose = foreign or "NVIDIA's installer (sudo nvidia-uninstall)"
        raise Unanswered(f"{name}: {state}; it came from {whose}, which must not be mixed with Ubuntu's: first remove it")
    if nvidia.secure_boot is not False and nvidia.loaded is None:
        on = "Secure Boot is on" if nvidia.secure_boot else "it is not known whether Secure Boot is on"
        why = "the kernel does not load a driver built here until its key is enrolled at the console"
        raise Unanswered(f"{name}: {on}: {why}. Disable Secure Boot, or install Ubuntu's signed modules by hand")
    suffix = "-open" if gpu_generations.flavour(known) == "open" else ""
    branch = gpu_generations.branch(known, cuda, int(_OWN.sub(r"\1", own)) if own else None)
    wanted = [f"nvidia-headless-{branch}-server{suffix}", f"nvidia-utils-{branch}-server"]
    wanted += [f"nvidia-compute-utils-{branch}-server", f"linux-headers-{system.kernel}"]
    wanted += [f"nvidia-fabricmanager-{branch}"] if nvidia.switches else []
    if not all(package in versions for package in wanted):
        return install(wanted, "--allow-change-held-packages")
    if nvidia.module is None:  # the kernel was upgraded after the module was built, or the build was interrupted
        build = f"dkms autoinstall -k {system.kernel}; modinfo -F version nvidia"
        return [shell(f"build the driver for kernel {system.kernel}", build, timeout_s=1800)]
    return []


def _without_nouveau(target: Target, nvidia: Nvidia) -> list[Change]:
    wanted = render("node/nouveau.conf.j2").encode()
    changes: list[Change] = []
    if _differs(target, NOUVEAU, wanted):
        changes.append(Write("block the driver nouveau", NOUVEAU, wanted))
    if changes or nvidia.nouveau:  # if nouveau is loaded, the initramfs may still contain nouveau
        changes.append(
            RunCommand("update the initramfs, so that the kernel starts without nouveau", ["update-initramfs", "-u"], 600)
        )
    return changes


def _reboot(site: Site, name: str, nvidia: Nvidia) -> str:
    """Why a node has to reboot. Raises Unanswered if the reboot would end jobs of Slurm. name: the node."""
    if site.cluster.slurm is not None:
        (controller,) = site.with_role("controller")
        states = {} if controller.node.name in site.skipped else controller.facts[NODES]
        if name in states and states[name].state in BUSY:
            # The operation `slurm-nodes` resumes a node with this reason.
            drain = f"sudo scontrol update NodeName={name} State=DRAIN Reason=shardlab:driver"
            raise Unanswered(f"{name}: its driver needs a reboot, but jobs run on it; drain it first: {drain}")
    if nvidia.nouveau:
        return "nouveau drives its GPUs"
    return f"the loaded driver is not the required one ({nvidia.versions})"


def _services(target: Target, nvidia: Nvidia) -> list[Change]:
    wanted = render("node/persistence.conf.j2").encode()
    changes: list[Change] = []
    if _differs(target, PERSISTENCE, wanted):
        folder = PERSISTENCE.rpartition("/")[0]
        changes.append(RunCommand("make a folder for our settings of nvidia-persistenced", ["mkdir", "-p", folder]))
        changes.append(Write(f"write {PERSISTENCE}", PERSISTENCE, wanted))
        changes.append(RunCommand("make systemd read this file", ["systemctl", "daemon-reload"]))
    changes += running(target, "nvidia-persistenced", [PERSISTENCE], changed=bool(changes))
    return [*changes, *(running(target, "nvidia-fabricmanager", []) if nvidia.switches else [])]


def _differs(target: Target, path: str, content: bytes) -> bool:
    there = target.facts[FILES].get(path)
    return there is None or not there.holds(content)


DRIVER = Operation("nvidia", plan, files=(NOUVEAU, PERSISTENCE))
