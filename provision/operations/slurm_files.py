"""Renders Slurm's configuration files from the facts of the nodes. All values were checked, so no value contains a line
break."""

from __future__ import annotations

import re

import msgspec

from provision.fact import Unanswered
from provision.facts.packages import PACKAGES
from provision.facts.system import SYSTEM
from provision.operation import Site, Target
from shardlab.cluster.cluster import Cluster
from templates import render

SLURM_CONF, GRES_CONF, CGROUP_CONF = "/etc/slurm/slurm.conf", "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"
PRACTICE_GPUS, REAL_GPUS = "/opt/gpus", "/dev"
MEMORY_SHARE = 0.95  # the share of a node's memory that slurm.conf states; Slurm drains a node that reports less than stated
DISABLES_CGROUPS = (24, 5)  # the first release of Slurm with the setting CgroupPlugin=disabled
_CONF_WORD = re.compile(r"[A-Za-z0-9._:\[\]/-]+")


class WorkerEntry(msgspec.Struct, frozen=True):
    """The values for a worker's line in slurm.conf."""

    name: str
    address: str
    cpus: int
    memory_mib: int
    gres: str
    """The generic resources, such as gpu:a100:4; empty without GPUs."""


def render_slurm_files(site: Site) -> dict[str, bytes]:
    """The content of the controller's configuration files, by path. Raises Unanswered if facts of a worker are not known."""
    (controller,) = site.list_with_role("controller")
    worker_targets = [worker for worker in site.list_with_role("worker") if worker.node.name not in site.skipped]
    if not worker_targets:
        raise Unanswered("all workers have failed, so slurm.conf cannot be written")
    worker_entries = [_make_worker_entry(site.cluster, target) for target in worker_targets]
    worker_systems = [target.facts[SYSTEM] for target in worker_targets]
    is_kernel_shared = any(system.is_container for system in worker_systems)
    gpus = site.cluster.gpus
    device_path = _make_device_path(site)
    for conf_word in (
        controller.node.name,
        controller.node.address,
        *(worker_text for worker in worker_entries for worker_text in (worker.name, worker.address)),
        device_path,
    ):
        if not _CONF_WORD.fullmatch(conf_word):
            raise Unanswered(f"{conf_word!r} is not allowed in slurm.conf")
    assert site.cluster.slurm is not None
    slurm_conf = render(
        "slurm_conf/slurm.conf.j2",
        cluster=site.cluster.name,
        controller=controller.node,
        workers=worker_entries,
        gpus=any(worker.gres for worker in worker_entries),
        partition=site.cluster.slurm.partition,
        shared_kernel=is_kernel_shared,
        memory_per_cpu_mib=min(worker.memory_mib // worker.cpus for worker in worker_entries),
    )
    gres_conf = render("slurm_conf/gres.conf.j2", workers=worker_entries, kind=gpus.type if gpus else None, devices=device_path)
    is_unified = all(system.cgroup == "cgroup2fs" for system in worker_systems)
    cgroup_plugin = "cgroup/v2" if is_unified else "cgroup/v1"
    if is_kernel_shared and is_unified and _parse_slurm_release(controller) >= DISABLES_CGROUPS:
        # practice nodes do not need cgroups, and the plugin cgroup/v2 fails on a kernel whose controllers are in version 1
        cgroup_plugin = "disabled"
    cgroup_conf = render("slurm_conf/cgroup.conf.j2", plugin=cgroup_plugin, shared_kernel=is_kernel_shared)
    return {SLURM_CONF: slurm_conf.encode(), GRES_CONF: gres_conf.encode(), CGROUP_CONF: cgroup_conf.encode()}


def _parse_slurm_release(controller: Target) -> tuple[int, ...]:
    """The release of Slurm on the controller, such as (24, 11); () if the package slurmctld is not installed yet."""
    package_version = controller.facts[PACKAGES].versions.get("slurmctld", "")
    return tuple(int(version_part) for version_part in package_version.split(".")[:2] if version_part.isdigit())


def render_slurmdbd_conf(site: Site) -> bytes:
    """The content of slurmdbd.conf."""
    (controller,) = site.list_with_role("controller")
    return render("slurm_conf/slurmdbd.conf.j2", controller=controller.node.name).encode()


def _make_worker_entry(cluster: Cluster, target: Target) -> WorkerEntry:
    system_facts = target.facts[SYSTEM]
    gpus = cluster.gpus
    gres_text = ":".join(["gpu", *([gpus.type] if gpus.type else []), str(gpus.per_node)]) if gpus and gpus.per_node else ""
    memory_mib = int(system_facts.memory_kib / 1024 * MEMORY_SHARE)
    return WorkerEntry(target.node.name, target.node.address, system_facts.cpus, memory_mib, gres_text)


def _make_device_path(site: Site) -> str:
    gpu_count = site.cluster.gpus.per_node if site.cluster.gpus else 0
    folder = PRACTICE_GPUS if site.is_practice else REAL_GPUS
    return f"{folder}/nvidia[0-{gpu_count - 1}]" if gpu_count > 1 else f"{folder}/nvidia0"
