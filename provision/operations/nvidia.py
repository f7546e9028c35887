"""Installs NVIDIA's driver if the cluster file requests GPUs: all parts of one version, with the kernel modules for these GPUs.

A driver from another source is not changed if it works and is new enough for the pinned torch. The installed packages are
Ubuntu's own (sources nvidia-graphics-drivers-580-server and fabric-manager-580, in jammy and noble).
"""

from __future__ import annotations

import re

from provision import generations
from provision.facts import Unanswered
from provision.facts.files import FILES
from provision.facts.nodes import NODES
from provision.facts.nvidia import NVIDIA, Nvidia
from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.facts.wheels import torch_of
from provision.generations import Generation
from provision.operations import Change, Nothing, Operation, Run, Site, Target, Write, shell
from provision.operations.packages import install
from provision.operations.reboot import Reboot
from provision.operations.service import running
from templates import render

NOUVEAU = "/etc/modprobe.d/shardlab-nouveau.conf"
PERSISTENCE = "/etc/systemd/system/nvidia-persistenced.service.d/shardlab.conf"
# Packages of the driver and the kernel: with a library that is newer than the loaded module, every job fails until a reboot.
KEPT = r"^((lib)?nvidia-.*[0-9]{3}(-|$)|linux-(generic|virtual|image|headers)(-|$))"
LIST = "dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' | sed -n 's/^.i  *//p'"
HOLD = f"{LIST} | grep -E '{KEPT}' | xargs apt-mark hold"
BUSY = ("alloc", "mix", "comp", "drng")  # drng: drained, but its jobs still run
_OWN = re.compile(r"^nvidia-(?:headless|headless-no-dkms|driver)-(\d{3})-server(?:-open)?$")
# What Ubuntu's -server packages must not be mixed with: its desktop drivers, and NVIDIA's own packages.
_FOREIGN = re.compile(r"^(cuda-drivers|nvidia-open|nvidia-driver$|nvidia-(driver|dkms|headless)-\d{3}(-open)?$)")


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Raises Unanswered, before anything is changed, for GPUs that cannot be supported."""
    name = target.node.name
    asked = site.cluster.gpus.per_node if site.cluster.gpus else 0
    if target.facts[SYSTEM].is_container:
        return Nothing("it is a container, which uses the kernel and the driver of its host")
    if not asked or not target.has("worker"):
        return Nothing("the cluster file requests no GPUs for it")
    found = target.facts[NVIDIA]
    if not found.gpus:
        raise Unanswered(f"{name}: the cluster file requests {asked} GPUs, but its PCI bus has no NVIDIA GPU")
    cuda = _cuda(target)
    known = _known(name, found)
    if (why := generations.unserved(known, target.facts[SYSTEM].arch, cuda)) is not None:
        raise Unanswered(f"{name}: {why}")
    if parted := sum(one.mig is True for one in found.seen):
        raise Unanswered(
            f"{name}: MIG divides {parted} of its GPUs, but runs need whole GPUs: sudo nvidia-smi -mig 0, then reboot"
        )
    serves = found.works and _branch(found) >= generations.oldest_driver(cuda)
    told = f"driver {found.nvml} works with {len(found.seen)} GPUs"
    if serves and _own(target) is None:
        return Nothing(f"{told}; it came from another source and is not changed")
    changes = _fabric(target, found) if serves else _driver(target, found, known, cuda)
    if changes or any(re.match(KEPT, one) and one not in found.held for one in target.facts[PACKAGES].versions):
        changes.append(shell("keep the driver and the kernel at their versions (apt-mark hold)", HOLD))
    changes += _without_nouveau(target, found)
    changes += _services(target, found) if serves else [Reboot(_reboot(site, name, found))]
    return changes or Nothing(told)


def _cuda(target: Target) -> str:
    """The CUDA release of the torch that this node will get. Raises Unanswered."""
    folder = target.node.wheelhouse
    cuda = target.facts[torch_of(folder)] if folder else generations.USUAL_CUDA
    if cuda is None:
        raise Unanswered(f"{target.node.name}: the torch in {folder} is built without CUDA; replace it by a build with CUDA")
    return cuda


def _known(name: str, found: Nvidia) -> list[Generation]:
    kinds = {one.device: generations.of(one.device) for one in found.gpus}
    strange = ", ".join(f"10de:{device:04x}" for device, one in kinds.items() if one is None)
    if strange:
        raise Unanswered(f"{name}: the driver for the GPU {strange} is not known: it is no GPU from Kepler to Blackwell")
    return [one for one in kinds.values() if one is not None]


def _own(target: Target) -> str | None:
    """Ubuntu's package with the driver, if it is installed."""
    return next((name for name in target.facts[PACKAGES].versions if _OWN.match(name)), None)


def _branch(found: Nvidia) -> int:
    return int(found.nvml.partition(".")[0]) if found.nvml else 0


def _fabric(target: Target, found: Nvidia) -> list[Change]:
    """Install a fabric manager of the driver's version if GPUs are connected by switches: without it, nothing runs."""
    package = f"nvidia-fabricmanager-{_branch(found)}"
    there = target.facts[PACKAGES].versions.get(package, "")
    if not found.switches or there.startswith(f"{found.nvml}-"):
        return []
    return install([f"{package}={found.nvml}-*"], "--allow-change-held-packages")


def _driver(target: Target, found: Nvidia, known: list[Generation], cuda: str) -> list[Change]:
    name, versions, system = target.node.name, target.facts[PACKAGES].versions, target.facts[SYSTEM]
    own = _own(target)
    state = f"its driver does not work with torch for CUDA {cuda} ({found.versions})"
    if system.id != "ubuntu":
        why = f"shardlab installs drivers on Ubuntu only, and {system.pretty} has no driver of branch {generations.BRANCH}"
        raise Unanswered(f"{name}: {state}; {why}: install NVIDIA's driver by hand and try again")
    foreign = ", ".join(sorted(one for one in versions if _FOREIGN.match(one)))
    if foreign or (found.module is not None and own is None):
        whose = foreign or "NVIDIA's installer (sudo nvidia-uninstall)"
        raise Unanswered(f"{name}: {state}; it came from {whose}, which must not be mixed with Ubuntu's: first remove it")
    if found.secure_boot is not False and found.loaded is None:
        on = "Secure Boot is on" if found.secure_boot else "it is not known whether Secure Boot is on"
        why = "the kernel does not load a driver built here until its key is enrolled at the console"
        raise Unanswered(f"{name}: {on}: {why}. Disable Secure Boot, or install Ubuntu's signed modules by hand")
    suffix = "-open" if generations.flavour(known) == "open" else ""
    branch = generations.branch(known, cuda, int(_OWN.sub(r"\1", own)) if own else None)
    wanted = [f"nvidia-headless-{branch}-server{suffix}", f"nvidia-utils-{branch}-server"]
    wanted += [f"nvidia-compute-utils-{branch}-server", f"linux-headers-{system.kernel}"]
    wanted += [f"nvidia-fabricmanager-{branch}"] if found.switches else []
    if not all(one in versions for one in wanted):
        return install(wanted, "--allow-change-held-packages")
    if found.module is None:  # the kernel is newer than the module, or its building was interrupted
        build = f"dkms autoinstall -k {system.kernel}; modinfo -F version nvidia"
        return [shell(f"build the driver for kernel {system.kernel}", build, timeout_s=1800)]
    return []


def _without_nouveau(target: Target, found: Nvidia) -> list[Change]:
    wanted = render("node/nouveau.conf.j2").encode()
    changes: list[Change] = []
    if _differs(target, NOUVEAU, wanted):
        changes.append(Write("block the driver nouveau", NOUVEAU, wanted))
    if changes or found.nouveau:  # loaded: what the kernel starts from may still have it
        changes.append(Run("update the initramfs, so that the kernel starts without nouveau", ["update-initramfs", "-u"], 600))
    return changes


def _reboot(site: Site, name: str, found: Nvidia) -> str:
    """Why a reboot is needed; raises Unanswered if it would end jobs."""
    if site.cluster.slurm is not None:
        (controller,) = site.with_role("controller")
        states = {} if controller.node.name in site.left else controller.facts[NODES]
        if name in states and states[name].state in BUSY:
            drain = f"sudo scontrol update NodeName={name} State=DRAIN Reason=shardlab:driver"  # by which it is resumed again
            raise Unanswered(f"{name}: its driver needs a reboot, but jobs run on it; drain it first: {drain}")
    if found.nouveau:
        return "nouveau drives its GPUs"
    return f"the loaded driver is not the required one ({found.versions})"


def _services(target: Target, found: Nvidia) -> list[Change]:
    wanted = render("node/persistence.conf.j2").encode()
    changes: list[Change] = []
    if _differs(target, PERSISTENCE, wanted):
        folder = PERSISTENCE.rpartition("/")[0]
        changes.append(Run("make a folder for our settings of nvidia-persistenced", ["mkdir", "-p", folder]))
        changes.append(Write(f"write {PERSISTENCE}", PERSISTENCE, wanted))
        changes.append(Run("make systemd read this file", ["systemctl", "daemon-reload"]))
    changes += running(target, "nvidia-persistenced", [PERSISTENCE], changed=bool(changes))
    return [*changes, *(running(target, "nvidia-fabricmanager", []) if found.switches else [])]


def _differs(target: Target, path: str, content: bytes) -> bool:
    there = target.facts[FILES].get(path)
    return there is None or not there.holds(content)


DRIVER = Operation("nvidia", plan)
