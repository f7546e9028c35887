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
from provision.facts.wheels import make_torch_build_query
from provision.gpu_generations import GpuGeneration
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write, shell_change
from provision.operations.packages import make_install_changes
from provision.operations.reboot import Reboot
from provision.operations.service import plan_running_service
from templates import render

NOUVEAU_CONF = "/etc/modprobe.d/shardlab-nouveau.conf"
PERSISTENCE_CONF = "/etc/systemd/system/nvidia-persistenced.service.d/shardlab.conf"
# Packages of the driver and the kernel, which apt must not upgrade: if the library is newer than the loaded module, every job
# fails until a reboot.
HELD_PACKAGES = r"^((lib)?nvidia-.*[0-9]{3}(-|$)|linux-(generic|virtual|image|headers)(-|$))"
LIST_PACKAGES = "dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' | sed -n 's/^.i  *//p'"
HOLD_PACKAGES = f"{LIST_PACKAGES} | grep -E '{HELD_PACKAGES}' | xargs apt-mark hold"
BUSY_STATES = ("alloc", "mix", "comp", "drng")  # a node with running jobs; drng: it is drained, but its jobs still run
_UBUNTU_DRIVER = re.compile(r"^nvidia-(?:headless|headless-no-dkms|driver)-(\d{3})-server(?:-open)?\Z")
# Packages that must not be mixed with Ubuntu's -server packages: Ubuntu's desktop drivers, and NVIDIA's own packages.
_FOREIGN_DRIVER = re.compile(r"^(cuda-drivers|nvidia-open|nvidia-driver$|nvidia-(driver|dkms|headless)-\d{3}(-open)?$)")


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Install the driver, or build its kernel module, and reboot if needed.

    Raises Unanswered, before anything is changed, if the GPUs cannot be supported.
    """
    name = target.node.name
    requested_gpus = site.cluster.gpus.per_node if site.cluster.gpus else 0
    if target.facts[SYSTEM].is_container:
        return Nothing("it is a container, which uses the kernel and the driver of its host")
    if not requested_gpus or not target.has_role("worker"):
        return Nothing("the cluster file requests no GPUs for it")
    nvidia = target.facts[NVIDIA]
    if not nvidia.gpus:
        raise Unanswered(f"{name}: the cluster file requests {requested_gpus} GPUs, but its PCI bus has no NVIDIA GPU")
    if nvidia.faults:
        gpu_advice = "No run should use it: the kernel's reason is in `sudo dmesg | grep -i xid`; reset or replace the GPU"
        raise Unanswered(f"{name}: a GPU does not answer nvidia-smi: {'; '.join(nvidia.faults)}. {gpu_advice}")
    cuda_release = _find_torch_cuda(target)
    generations = _find_generations(name, nvidia)
    if (unsupported := gpu_generations.explain_unsupported(generations, target.facts[SYSTEM].arch, cuda_release)) is not None:
        raise Unanswered(f"{name}: {unsupported}")
    if divided_gpus := sum(gpu.mig is True for gpu in nvidia.seen):
        raise Unanswered(
            f"{name}: MIG divides {divided_gpus} of its GPUs, but runs need whole GPUs: sudo nvidia-smi -mig 0, then reboot"
        )
    is_sufficient = nvidia.works and _parse_driver_branch(nvidia) >= gpu_generations.find_oldest_driver_branch(cuda_release)
    remark_clauses = "".join(f"; nvidia-smi warns: {remark}" for remark in nvidia.remarks)
    works_text = f"driver {nvidia.nvml} works with {len(nvidia.seen)} GPUs{remark_clauses}"
    if is_sufficient and not target.node.may_sudo:
        return Nothing(f"{works_text}; without root, it is not changed")
    if is_sufficient and _find_ubuntu_driver(target) is None:
        return Nothing(f"{works_text}; it came from another source and is not changed")
    changes = _plan_fabric_manager(target, nvidia) if is_sufficient else _plan_driver(target, nvidia, generations, cuda_release)
    if changes or any(re.match(HELD_PACKAGES, name) and name not in nvidia.held for name in target.facts[PACKAGES].versions):
        changes.append(shell_change("keep the driver and the kernel at their versions (apt-mark hold)", HOLD_PACKAGES))
    changes += _plan_nouveau_block(target, nvidia)
    changes += _plan_services(target, nvidia) if is_sufficient else [Reboot(_explain_reboot(site, name, nvidia))]
    return changes or Nothing(works_text)


def _find_torch_cuda(target: Target) -> str:
    """The CUDA release of the torch that this node will get. Raises Unanswered."""
    folder = target.node.wheelhouse
    cuda_release = target.facts[make_torch_build_query(folder)] if folder else gpu_generations.USUAL_CUDA
    if cuda_release is None:
        raise Unanswered(f"{target.node.name}: the torch in {folder} is built without CUDA; replace it by a build with CUDA")
    return cuda_release


def _find_generations(node_name: str, nvidia: Nvidia) -> list[GpuGeneration]:
    generation_by_device = {gpu.device: gpu_generations.find_generation(gpu.device) for gpu in nvidia.gpus}
    unknown = ", ".join(f"10de:{device:04x}" for device, generation in generation_by_device.items() if generation is None)
    if unknown:
        raise Unanswered(f"{node_name}: the driver for the GPU {unknown} is not known: it is no GPU from Kepler to Blackwell")
    return [generation for generation in generation_by_device.values() if generation is not None]


def _find_ubuntu_driver(target: Target) -> str | None:
    """The name of Ubuntu's package with the driver that is installed on the node; None if no such package is installed."""
    return next((package_name for package_name in target.facts[PACKAGES].versions if _UBUNTU_DRIVER.match(package_name)), None)


def _parse_driver_branch(nvidia: Nvidia) -> int:
    return int(nvidia.nvml.partition(".")[0]) if nvidia.nvml else 0


def _plan_fabric_manager(target: Target, nvidia: Nvidia) -> list[Change]:
    """Install the fabric manager in the driver's version if the GPUs are connected by NVSwitches: without it, no GPU works."""
    package_name = f"nvidia-fabricmanager-{_parse_driver_branch(nvidia)}"
    installed_version = target.facts[PACKAGES].versions.get(package_name, "")
    if not nvidia.switches or installed_version.startswith(f"{nvidia.nvml}-"):
        return []
    return make_install_changes([f"{package_name}={nvidia.nvml}-*"], "--allow-change-held-packages")


def _plan_driver(target: Target, nvidia: Nvidia, generations: list[GpuGeneration], cuda_release: str) -> list[Change]:
    name, version_by_package, system_facts = target.node.name, target.facts[PACKAGES].versions, target.facts[SYSTEM]
    driver_package = _find_ubuntu_driver(target)
    state_text = f"its driver does not work with torch for CUDA {cuda_release} ({nvidia.versions})"
    if system_facts.id != "ubuntu":
        lacking_driver = f"{system_facts.pretty} has no driver of branch {gpu_generations.LONG_SUPPORT_BRANCH}"
        why = f"shardlab installs drivers on Ubuntu only, and {lacking_driver}"
        raise Unanswered(f"{name}: {state_text}; {why}: install NVIDIA's driver by hand and try again")
    foreign_packages = ", ".join(sorted(package for package in version_by_package if _FOREIGN_DRIVER.match(package)))
    if foreign_packages or (nvidia.module is not None and driver_package is None):
        driver_source = foreign_packages or "NVIDIA's installer (sudo nvidia-uninstall)"
        raise Unanswered(
            f"{name}: {state_text}; it came from {driver_source}, which must not be mixed with Ubuntu's: first remove it"
        )
    if nvidia.secure_boot is not False and nvidia.loaded is None:
        secure_boot_text = "Secure Boot is on" if nvidia.secure_boot else "it is not known whether Secure Boot is on"
        why = "the kernel does not load a driver built here until its key is enrolled at the console"
        raise Unanswered(f"{name}: {secure_boot_text}: {why}. Disable Secure Boot, or install Ubuntu's signed modules by hand")
    package_suffix = "-open" if gpu_generations.choose_kernel_module_kind(generations) == "open" else ""
    driver_branch = gpu_generations.choose_driver_branch(
        generations, cuda_release, int(_UBUNTU_DRIVER.sub(r"\1", driver_package)) if driver_package else None
    )
    needed_packages = [f"nvidia-headless-{driver_branch}-server{package_suffix}", f"nvidia-utils-{driver_branch}-server"]
    needed_packages += [f"nvidia-compute-utils-{driver_branch}-server", f"linux-headers-{system_facts.kernel}"]
    needed_packages += [f"nvidia-fabricmanager-{driver_branch}"] if nvidia.switches else []
    if not all(package in version_by_package for package in needed_packages):
        return make_install_changes(needed_packages, "--allow-change-held-packages")
    if nvidia.module is None:  # the kernel was upgraded after the module was built, or the build was interrupted
        build_command = f"dkms autoinstall -k {system_facts.kernel}; modinfo -F version nvidia"
        return [shell_change(f"build the driver for kernel {system_facts.kernel}", build_command, timeout_s=1800)]
    return []


def _plan_nouveau_block(target: Target, nvidia: Nvidia) -> list[Change]:
    conf_bytes = render("node/nouveau.conf.j2").encode()
    changes: list[Change] = []
    if _file_differs(target, NOUVEAU_CONF, conf_bytes):
        changes.append(Write("block the driver nouveau", NOUVEAU_CONF, conf_bytes))
    if changes or nvidia.nouveau:  # if nouveau is loaded, the initramfs may still contain nouveau
        changes.append(
            RunCommand("update the initramfs, so that the kernel starts without nouveau", ["update-initramfs", "-u"], 600)
        )
    return changes


def _explain_reboot(site: Site, node_name: str, nvidia: Nvidia) -> str:
    """Why a node has to reboot. Raises Unanswered if the reboot would end jobs of Slurm. node_name: the node."""
    if site.cluster.slurm is not None:
        (controller,) = site.list_with_role("controller")
        slurm_node_by_name = {} if controller.node.name in site.skipped else controller.facts[NODES]
        if node_name in slurm_node_by_name and slurm_node_by_name[node_name].state in BUSY_STATES:
            # The operation `slurm-nodes` resumes a node with this reason.
            drain_command = f"sudo scontrol update NodeName={node_name} State=DRAIN Reason=shardlab:driver"
            raise Unanswered(f"{node_name}: its driver needs a reboot, but jobs run on it; drain it first: {drain_command}")
    if nvidia.nouveau:
        return "nouveau drives its GPUs"
    return f"the loaded driver is not the required one ({nvidia.versions})"


def _plan_services(target: Target, nvidia: Nvidia) -> list[Change]:
    conf_bytes = render("node/persistence.conf.j2").encode()
    changes: list[Change] = []
    if _file_differs(target, PERSISTENCE_CONF, conf_bytes):
        folder = PERSISTENCE_CONF.rpartition("/")[0]
        changes.append(RunCommand("make a folder for our settings of nvidia-persistenced", ["mkdir", "-p", folder]))
        changes.append(Write(f"write {PERSISTENCE_CONF}", PERSISTENCE_CONF, conf_bytes))
        changes.append(RunCommand("make systemd read this file", ["systemctl", "daemon-reload"]))
    changes += plan_running_service(target, "nvidia-persistenced", [PERSISTENCE_CONF], config_changed=bool(changes))
    return [*changes, *(plan_running_service(target, "nvidia-fabricmanager", []) if nvidia.switches else [])]


def _file_differs(target: Target, path: str, content: bytes) -> bool:
    present_file = target.facts[FILES].get(path)
    return present_file is None or not present_file.holds(content)


DRIVER = Operation("nvidia", plan, written_paths=(NOUVEAU_CONF, PERSISTENCE_CONF))
