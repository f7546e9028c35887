"""Tests of NVIDIA and RDMA, as data: output of machines leads to commands. The tests have not run on machines with GPUs."""

import hashlib
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from provision import gpu_generations
from provision.checks import _compiled, _matmul
from provision.checks import compiled as compiled_check
from provision.checks import driver as driver_check
from provision.checks import rdma as rdma_check
from provision.fact import FactAnswers, Unanswered
from provision.facts import nvidia as nvidia_fact
from provision.facts import wheels
from provision.facts.addresses import ADDRESSES
from provision.facts.files import FILES, NodeFile
from provision.facts.nodes import NODES, SlurmNode
from provision.facts.nvidia import NVIDIA
from provision.facts.packages import PACKAGES, Packages
from provision.facts.packages import parse as parse_packages
from provision.facts.rdma import RDMA
from provision.facts.rdma import parse as parse_rdma
from provision.facts.services import SERVICES, Service
from provision.facts.system import SYSTEM, System
from provision.operation import Nothing, Site, Target
from provision.operations import nvidia, rdma
from provision.operations.reboot import Reboot
from provision.providers.ssh import SshNode
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.cluster.slurm_keys import Gpus, Slurm
from shardlab.remote.remote import CommandOutput
from templates import render

KERNEL = "6.8.0-90-generic"
NOBLE = System(
    id="ubuntu", codename="noble", pretty="Ubuntu 24.04.3 LTS", kernel=KERNEL, arch="x86_64", hostname="w1", virt="none",
    boot_id="1", cpus=96, memory_kib=512 * 2**20, cgroup="cgroup2fs", user="alice",
)  # fmt: skip
BOOKWORM = msgspec.structs.replace(NOBLE, id="debian", codename="bookworm", pretty="Debian GNU/Linux 12")
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Thu Dec  4 2025"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Dec  4 20:11:31 UTC 2025"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
NO_SMI = "sh: 8: nvidia-smi: not found"


def said(
    device, count, *, loaded="", module="", nvml=None, persistence="Enabled", mig="Disabled", **more
) -> nvidia_fact.Nvidia:
    """Returns the parsed output of the script for a machine with `count` GPUs of this device number."""
    lines = [f"pci=0000:{place:02x}:00.0 0x030200 0x{device:04x}" for place in range(1, count + 1)]
    lines += [f"pci=0000:{place:02x}:00.0 0x068000 0x1af1" for place in range(0xC0, 0xC0 + more.get("switches", 0))]
    lines += [f"loaded={loaded}", f"module={module}"]
    rows = [f"gpu={nvml}, {persistence}, {mig}, Enabled, NVIDIA X, GPU-{place}" for place in range(count)]
    lines += rows if nvml else [f"why_no_nvml={more.get('why', NO_SMI)}"]
    lines += ["nouveau=1"] if more.get("nouveau") else []
    lines += [f"secure_boot={more.get('secure_boot', 0)}", *(f"held={name}" for name in more.get("held", ()))]
    return nvidia_fact.parse("\n".join(lines) + "\n")


def working(device, count, version="580.105.08", **more):
    return said(device, count, loaded=OPEN.format(version), module=version, nvml=version, **more)


A100_SXM, A100_PCIE, V100, P100, K80, GH200, B200 = 0x20B0, 0x20F1, 0x1DB1, 0x15F8, 0x102D, 0x2342, 0x2901
FRESH = {f"linux-image-{KERNEL}": "6.8", "linux-image-generic": "6.8"}
DRIVEN = {
    **FRESH,
    "nvidia-headless-580-server-open": "580.105.08-0ubuntu0.24.04.1",
    "nvidia-utils-580-server": "580.105.08-0ubuntu0.24.04.1",
    "nvidia-compute-utils-580-server": "580.105.08-0ubuntu0.24.04.1",
    "libnvidia-compute-580-server": "580.105.08-0ubuntu0.24.04.1",
    f"linux-headers-{KERNEL}": "6.8",
}
WRITTEN = {
    path: NodeFile(0o644, "root:root", 100.0, hashlib.sha256(render(template).encode()).hexdigest())
    for path, template in ((nvidia.NOUVEAU_CONF, "node/nouveau.conf.j2"), (nvidia.PERSISTENCE_CONF, "node/persistence.conf.j2"))
}
RUNNING = {name: Service("active", True, 200.0) for name in ("nvidia-persistenced", "nvidia-fabricmanager")}


def site(found, *, packages=FRESH, files=None, services=None, system=NOBLE, state="idle", wheelhouse=None, **more) -> Site:
    """A site with a controller and one worker. The answers of the worker are known."""
    entries = [NodeEntry(name="head", roles=["controller"]), NodeEntry(name="w1")]
    gpus = Gpus(per_node=more.get("asked", 4))
    cluster = Cluster(schema=1, name="bench", provider="ssh", nodes=entries, gpus=gpus, slurm=Slurm())
    targets = []
    for number, entry in enumerate(entries, start=1):
        node = SshNode(entry.name, f"10.0.0.{number}", None, "alice", None, "/opt/x/bin/python", wheelhouse, remote=None)
        targets.append(Target(node, FactAnswers(node), entry))
        targets[-1].facts.answers = {
            SYSTEM.name: system, NVIDIA.name: found, PACKAGES.name: Packages(packages, interrupted=False),
            FILES.name: files or {}, SERVICES.name: services or {}, NODES.name: {"w1": SlurmNode(state)},
            RDMA.name: more.get("links", []), **more.get("answers", {}),
        }  # fmt: skip
    return Site(cluster, None, targets)


def commands(planned) -> list[str]:
    assert not isinstance(planned, Nothing), planned
    return [change.command for change in planned]


def plan(found, **more):
    one = site(found, **more)
    return nvidia.plan(one, one.targets[1])


def done(found, **more):
    """Returns the plan for the same machine after all changes: its packages are on hold."""
    packages = more.pop("packages", DRIVEN)
    held = [name for name in packages if re.match(nvidia.HELD_PACKAGES, name)]
    found = msgspec.structs.replace(found, held=held)
    return plan(found, packages=packages, files=WRITTEN, services=RUNNING, **more)


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs Debian or Ubuntu")
def test_the_list_of_held_packages_has_full_names():
    listed = subprocess.run(
        ["sh", "-euc", nvidia.LIST_PACKAGES], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "dpkg" in listed
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", name) for name in listed)


def test_the_script_runs_where_nothing_of_nvidia_is():
    answer = subprocess.run(nvidia_fact.build_command("python"), capture_output=True, text=True, check=True)
    found = nvidia_fact.parse(answer.stdout)
    assert found.works is (found.nvml is not None)
    assert not Path("/proc/driver/nvidia").exists() or found.loaded


def test_the_facts_of_a_working_nvidia_machine_are_parsed():
    found = working(A100_SXM, 4, switches=6, held=["nvidia-utils-580-server"])
    assert (found.loaded, found.module, found.nvml) == ("580.105.08",) * 3
    assert (len(found.gpus), len(found.switches), found.gpus[0].address) == (4, 6, "0000:01:00.0")
    assert found.seen[3] == nvidia_fact.GpuSettings("NVIDIA X", "GPU-3", persistence=True, mig=False, ecc=True)
    assert found.works
    assert found.held == ["nvidia-utils-580-server"]
    assert said(V100, 1, loaded=CLOSED.format("535.183.01")).loaded == "535.183.01"
    assert working(V100, 1, mig="[N/A]").seen[0].mig is None
    with pytest.raises(ValueError, match="does not have the columns"):
        nvidia_fact.parse("gpu=No devices were found\n")


ROW = "580.105.08, Enabled, Disabled, Enabled, NVIDIA X, GPU-{}"
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0"


def nvidia_smi(tmp_path, lines, code) -> nvidia_fact.Nvidia:
    """Returns what the script of the fact finds if nvidia-smi prints these lines and ends with this code."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    argv = nvidia_fact.build_command("python3")
    stdout = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False).stdout
    own_lines = [line for line in stdout.splitlines() if line.startswith(("gpu=", "why_no_nvml="))]
    driver = [f"loaded={OPEN.format('580.105.08')}", "module=580.105.08"]
    return nvidia_fact.parse("\n".join([*own_lines, *driver]))


@pytest.mark.parametrize("code", [0, 6, 14])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_warning_beside_complete_rows_is_a_remark(tmp_path, code, is_first):
    rows = [ROW.format(1), ROW.format(2)]
    found = nvidia_smi(tmp_path, [INFOROM, *rows] if is_first else [*rows, INFOROM], code)
    assert (found.works, len(found.seen), found.why_no_nvml, found.remarks, found.faults) == (True, 2, None, [INFOROM], [])


def test_without_rows_the_reason_or_the_wrong_line_is_quoted(tmp_path):
    assert nvidia_smi(tmp_path, [MISMATCH], 18).why_no_nvml == MISMATCH
    with pytest.raises(ValueError, match=r"580\.105\.08, Enabled'"):
        nvidia_smi(tmp_path, ["580.105.08, Enabled"], 0)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("580.105.08, [Unknown Error], [N/A], ERR!, NVIDIA X, GPU-2", "GPU 1 (GPU-2): [Unknown Error]"),
        ("[GPU requires reset], [GPU requires reset], [N/A], [N/A], X, GPU-2", "GPU 1 (GPU-2): [GPU requires reset]"),
        (
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.",
        ),
    ],
)
def test_a_gpu_that_does_not_answer_is_named_and_no_reboot_is_planned(tmp_path, line, named):
    found = nvidia_smi(tmp_path, [ROW.format(1), line], 15)
    assert found.works
    assert any(fault.startswith(named) for fault in found.faults)
    outcome = driver_check.judge_driver(found, 2)
    assert not outcome.passed
    assert named in outcome.says
    assert nvidia_smi(tmp_path, ["580.105.08, [Not Supported], [N/A], [N/A], X, GPU-2"], 0).faults == []


def test_the_facts_of_a_broken_nvidia_machine_are_parsed():
    half = said(A100_SXM, 4, loaded=OPEN.format("580.95.05"), module="580.105.08", why=MISMATCH)
    assert (half.works, half.nvml, half.why_no_nvml) == (False, None, MISMATCH)
    assert half.versions == "loaded 580.95.05, on disk 580.105.08, NVML none"
    assert working(A100_SXM, 1, nouveau=True).works is False
    assert said(A100_SXM, 1, secure_boot="").secure_boot is None


@pytest.mark.parametrize(
    ("device", "name"),
    [(K80, "Kepler"), (0x13F2, "Maxwell"), (P100, "Pascal"), (0x1DF6, "Volta"), (V100, "Volta"), (0x1EB8, "Turing"),
     (0x2182, "Turing"), (A100_SXM, "Ampere"), (A100_PCIE, "Ampere"), (0x20B7, "Ampere"), (0x25B6, "Ampere"), (0x26B9, "Ada"),
     (0x2330, "Hopper"), (0x2335, "Hopper"), (GH200, "Grace Hopper"), (B200, "Blackwell"),
     (0x2B85, "Blackwell"), (0x31C2, "Blackwell")],
)  # fmt: skip
def test_the_generation_of_a_gpu_follows_from_its_device_number(device, name):
    assert gpu_generations.find_generation(device).name == name


def test_generations_do_not_overlap_and_are_of_the_pinned_torch():
    """No device number belongs to two generations, and the table was made for the version of torch in constraints.txt."""
    ranges = sorted(pair for one in gpu_generations.GENERATIONS for pair in one.ids)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    constraints = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    assert (
        f"torch=={gpu_generations.TORCH_VERSION}" in constraints
    )  # if the version of torch changes, read PyTorch's RELEASE.md again


def test_the_gpus_of_a_machine_decide_the_kernel_module_and_driver_branch():
    """Which kernel module (open or proprietary) and which driver branch the GPUs of a machine need."""
    of = gpu_generations.find_generation
    assert gpu_generations.choose_kernel_module_kind([of(V100)]) == "proprietary"
    assert gpu_generations.choose_kernel_module_kind([of(A100_SXM)]) == "open"
    assert gpu_generations.choose_kernel_module_kind([of(P100), of(A100_SXM)]) == "proprietary"
    mixed = [{"Volta", "Blackwell"} <= names for names in gpu_generations.GENERATIONS_BY_BUILD.values()]
    assert not any(mixed)
    assert gpu_generations.choose_driver_branch([of(A100_SXM)], "13.0", 595) == 595
    assert gpu_generations.choose_driver_branch([of(A100_SXM)], "13.0", 535) == 580
    assert gpu_generations.choose_driver_branch([of(V100)], "12.6", 595) == 580


@pytest.mark.parametrize("device", [A100_SXM, A100_PCIE])
def test_a_fresh_machine_gets_the_open_driver_and_one_reboot(device):
    changes = plan(said(device, 4, nouveau=True))
    refresh, install, hold, _, initramfs, reboot = commands(changes)
    assert "update" in refresh
    packages = (
        f"nvidia-headless-580-server-open nvidia-utils-580-server nvidia-compute-utils-580-server linux-headers-{KERNEL}'"
    )
    assert install.endswith(packages)
    assert "apt-mark hold" in hold
    assert initramfs == "update-initramfs -u"
    assert reboot == "systemctl reboot"
    assert changes[-1].reason == "nouveau drives its GPUs"


def test_after_the_reboot_persistence_is_set_and_then_nothing_changes():
    held = {"held": [name for name in DRIVEN if re.match(nvidia.HELD_PACKAGES, name)]}
    rest = plan(working(A100_SXM, 4, **held), packages=DRIVEN, files={nvidia.NOUVEAU_CONF: WRITTEN[nvidia.NOUVEAU_CONF]})
    assert [one.rpartition("/")[2] for one in commands(rest)][2:] == [
        "systemctl daemon-reload", "systemctl enable --quiet nvidia-persistenced", "systemctl restart nvidia-persistenced",
    ]  # fmt: skip
    assert done(working(A100_SXM, 4)) == Nothing("driver 580.105.08 works with 4 GPUs")


def test_held_packages_count_as_installed_and_driver_and_kernel_are_held():
    there = parse_packages("hi \tnvidia-utils-580-server\t580\nii \tmunge\t1\nrc \told\t1\n")
    assert there.versions == {"nvidia-utils-580-server": "580", "munge": "1"}
    kept = [
        "libnvidia-compute-580-server",
        "nvidia-firmware-580-server-580.105.08",
        "linux-image-generic",
        "linux-generic-hwe-22.04",
    ]
    assert all(re.match(nvidia.HELD_PACKAGES, name) for name in kept)
    assert not any(
        re.match(nvidia.HELD_PACKAGES, name) for name in ("nvidia-container-toolkit", "linux-libc-dev", "linux-firmware")
    )
    (hold,) = commands(plan(working(A100_SXM, 4), packages=DRIVEN, files=WRITTEN, services=RUNNING))
    assert "apt-mark hold" in hold


def test_a_library_newer_than_the_module_that_runs_asks_for_a_reboot_alone():
    """If the driver on disk is newer than the loaded module, the plan is a reboot, but not while Slurm runs jobs there."""
    half = said(A100_SXM, 4, loaded=OPEN.format("580.95.05"), module="580.105.08", why=MISMATCH)
    (reboot,) = done(half)
    assert isinstance(reboot, Reboot)
    assert reboot.reason.endswith("(loaded 580.95.05, on disk 580.105.08, NVML none)")
    for state in ("mix", "alloc", "comp", "drng"):
        with pytest.raises(Unanswered, match="sudo scontrol update NodeName=w1 State=DRAIN Reason=shardlab:driver"):
            done(half, state=state)


def test_a_module_that_was_never_built_for_this_kernel_is_built():
    build, *_, reboot = commands(done(said(A100_SXM, 4)))
    assert f"dkms autoinstall -k {KERNEL}" in build
    assert reboot == "systemctl reboot"


def test_an_interrupted_installation_of_the_driver_is_completed():
    packages = {**FRESH, "nvidia-utils-580-server": "580.105.08-0ubuntu1"}
    assert "nvidia-headless-580-server-open" in commands(plan(said(A100_SXM, 4), packages=packages))[1]


def test_a_driver_that_is_too_old_for_torch_is_replaced_and_held_packages_may_change():
    packages = {**FRESH, "nvidia-headless-535-server": "535.183.01-0ubuntu1"}
    changes = commands(plan(working(A100_SXM, 4, "535.183.01"), packages=packages))
    assert "--allow-change-held-packages install nvidia-headless-580-server-open" in changes[1]
    assert changes[-1] == "systemctl reboot"


def test_a_driver_from_another_source_is_kept_if_it_works_with_torch():
    """A driver from another source is kept if it works with torch. Otherwise the plan fails, and our packages are not added."""
    packages = {**FRESH, "cuda-drivers": "590.48"}
    left = plan(working(A100_SXM, 4, "590.48.01"), packages=packages)
    assert left == Nothing("driver 590.48.01 works with 4 GPUs; it came from another source and is not changed")
    with pytest.raises(Unanswered, match="it came from cuda-drivers, which must not be mixed"):
        plan(working(A100_SXM, 4, "570.86.15"), packages=packages)
    with pytest.raises(Unanswered, match="NVIDIA's installer"):
        plan(working(A100_SXM, 4, "570.86.15"))


def test_secure_boot_is_reported_before_anything_is_changed():
    with pytest.raises(Unanswered, match="w1: Secure Boot is on: the kernel does not load a driver built here"):
        plan(said(A100_SXM, 4, nouveau=True, secure_boot=1))
    with pytest.raises(Unanswered, match="it is not known whether Secure Boot is on"):
        plan(said(A100_SXM, 4, secure_boot=""))
    assert isinstance(done(working(A100_SXM, 4, secure_boot=1)), Nothing)


def test_parted_gpus_are_refused():
    with pytest.raises(Unanswered, match="MIG divides 4 of its GPUs"):
        done(working(A100_SXM, 4, mig="Enabled"))


@pytest.mark.parametrize(("device", "name"), [(V100, "Volta"), (P100, "Pascal")])
def test_gpus_that_torch_no_longer_serves_are_named_before_anything_is_installed(device, name):
    with pytest.raises(
        Unanswered, match=rf"torch 2\.13\.0 for CUDA 13\.0 does not support {name} GPUs; .* its build for CUDA 12\.6"
    ):
        plan(said(device, 4))


def test_older_gpus_get_the_proprietary_driver_with_a_torch_that_serves_them():
    wheel = wheels.make_torch_build_query("/srv/wheels").name
    packages = commands(plan(said(V100, 4), wheelhouse="/srv/wheels", answers={wheel: "12.6"}))[1]
    assert " nvidia-headless-580-server nvidia-utils-580-server " in packages
    with pytest.raises(Unanswered, match="is built without CUDA"):
        plan(said(V100, 4), wheelhouse="/srv/wheels", answers={wheel: None})
    with pytest.raises(Unanswered, match="does not support Kepler GPUs; no other build supports them"):
        plan(said(K80, 2))
    old_and_new = nvidia_fact.Nvidia(gpus=[*said(V100, 1).gpus, *said(B200, 1).gpus], secure_boot=False)
    with pytest.raises(Unanswered, match="does not support Blackwell GPUs"):
        plan(old_and_new, wheelhouse="/srv/wheels", answers={wheel: "12.6"})


def test_builds_of_torch_by_the_names_of_their_wheels():
    assert wheels.parse("numpy-2.4-cp311.whl\ntorch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl\n") == "13.0"
    assert wheels.parse("torch-2.13.0+cu126-cp311.whl\ntorchvision-0.28.0+cu126-cp311.whl\n") == "12.6"
    assert wheels.parse("torch-2.13.0+cpu-cp311.whl\n") is None
    with pytest.raises(ValueError, match="0 builds of torch"):
        wheels.parse("numpy-2.4-cp311.whl\n")


def test_an_unknown_gpu_and_a_missing_one_are_refused():
    with pytest.raises(Unanswered, match="the driver for the GPU 10de:3f00 is not known"):
        plan(said(0x3F00, 4))
    with pytest.raises(Unanswered, match="requests 4 GPUs, but its PCI bus has no NVIDIA GPU"):
        plan(said(A100_SXM, 0))


def test_debian_has_no_driver_that_is_new_enough():
    with pytest.raises(Unanswered, match="on Ubuntu only, and Debian GNU/Linux 12 has no driver of branch 580"):
        plan(said(A100_SXM, 4), system=BOOKWORM)
    assert isinstance(plan(working(A100_SXM, 4), system=BOOKWORM), Nothing)


def test_machines_without_gpus_have_nothing_to_do():
    container = msgspec.structs.replace(NOBLE, virt="systemd-nspawn")
    assert isinstance(plan(said(A100_SXM, 0), system=container), Nothing)
    assert plan(said(A100_SXM, 0), asked=0) == Nothing("the cluster file requests no GPUs for it")
    one = site(said(A100_SXM, 0))
    assert isinstance(nvidia.plan(one, one.targets[0]), Nothing)  # the controller needs no driver


def test_switches_get_a_fabric_manager_of_the_drivers_version():
    install = commands(plan(said(A100_SXM, 8, switches=6)))[1]
    assert install.endswith("nvidia-fabricmanager-580'")
    running = working(A100_SXM, 8, switches=6)
    older = {**DRIVEN, "nvidia-fabricmanager-580": "580.95.05-1"}
    assert "nvidia-fabricmanager-580=580.105.08-*" in commands(done(running, packages=older))[1]
    right = {**DRIVEN, "nvidia-fabricmanager-580": "580.105.08-1"}
    assert isinstance(done(running, packages=right), Nothing)


def test_the_driver_check_compares_the_gpus_of_pci_driver_and_cluster_file():
    assert driver_check.judge_driver(working(A100_SXM, 4), 4) is None
    fewer = driver_check.judge_driver(working(A100_SXM, 3), 4)
    assert fewer.says == "the cluster file requests 4 GPUs, the PCI bus has 3, the driver sees 3"
    half = driver_check.judge_driver(said(A100_SXM, 4, module="580.105.08", why=MISMATCH), 4)
    assert half.says.endswith(f"NVML none); nvidia-smi: {MISMATCH}")
    right = driver_check.judge_product(CommandOutput(0, '{"wrong": [0, 0, 0, 0]}\n', ""), working(A100_SXM, 4))
    assert right.passed
    assert right.says == "all parts of the driver have version 580.105.08; 4 x NVIDIA X compute exactly"
    for answer, says in [
        (CommandOutput(0, '{"wrong": [0, 7, 0, 0]}\n', ""), "wrong elements in a matrix product: GPU 1: 7"),
        (CommandOutput(0, '{"wrong": []}\n', ""), "torch computed on 0 of 4 GPUs"),
        (CommandOutput(1, "", "torch.AcceleratorError: CUDA error: no kernel image\n"), "no kernel image"),
        (CommandOutput(None, "", ""), "did not end within"),
    ]:
        outcome = driver_check.judge_product(answer, working(A100_SXM, 4))
        assert outcome.passed is False
        assert says in outcome.says


def test_the_compile_check_judges_the_compiled_function():
    right = compiled_check.judge_compiled(CommandOutput(0, '{"difference": 2.4e-07}\n', ""))
    assert right.passed
    assert right.measured == {"largest_difference": 2.4e-07}
    for answer, says in [
        (CommandOutput(0, '{"difference": 0.5}\n', ""), "differs from the plain one by 0.5"),
        (CommandOutput(0, '{"difference": NaN}\n', ""), "cannot be read"),
        (
            CommandOutput(1, "", "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler.\n"),
            "Failed to find C compiler",
        ),
        (CommandOutput(None, "", ""), "did not end within 120 s"),
    ]:
        outcome = compiled_check.judge_compiled(answer)
        assert outcome.passed is False
        assert says in outcome.says


# torch itself causes the warning when it loads its compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_function_with_other_results_is_noticed(monkeypatch):
    """The CPU stands in for a GPU. A compiled function with a wrong result must be detected."""
    cpu = _compiled.torch.device("cpu")
    assert _compiled.measure_largest_difference(cpu) <= compiled_check.MOST_DIFFERENCE
    monkeypatch.setattr(_compiled.torch, "compile", lambda function, **_: lambda numbers: function(numbers) + 1e-3)
    assert _compiled.measure_largest_difference(cpu) > compiled_check.MOST_DIFFERENCE


def test_wrong_elements_of_a_matrix_product_on_a_device_are_counted(monkeypatch, capsys):
    """The CPU stands in for a GPU. `faulty` adds an error that is smaller than a rounding error of float32 may be."""
    assert _matmul.MATRIX_SIDE * (_matmul.FACTOR_LIMIT - 1) ** 2 < 2**24  # integers that float32 represents exactly
    cpu = _matmul.torch.device("cpu")
    assert _matmul.count_wrong_elements(cpu) == 0
    multiply = _matmul.torch.Tensor.__matmul__

    def faulty(left, right):
        product = multiply(left, right)
        if product.is_floating_point():
            product[3, 5] += 1
            product[511, 0] -= 1
        return product

    monkeypatch.setattr(_matmul.torch.Tensor, "__matmul__", faulty)
    assert _matmul.count_wrong_elements(cpu) == 2
    monkeypatch.undo()
    _matmul.main()
    found = msgspec.json.decode(capsys.readouterr().out)["wrong"]
    assert found == [0] * _matmul.torch.cuda.device_count()


CX6 = (
    "mlx5_0\t1\t4: ACTIVE\tEthernet\tens5f0\tIB/RoCE v1,RoCE v2,\t100 Gb/sec (4X EDR)\n"
    "mlx5_1\t1\t1: DOWN\tEthernet\tens5f1\tIB/RoCE v1,\t\n"
)
HDR = "mlx5_0\t1\t{}\tInfiniBand\t\tIB/RoCE v1,\t200 Gb/sec (4X HDR)\n"


def test_rdma_links_are_read():
    first, second = parse_rdma(CX6)
    assert (first.name, first.state, first.nic, first.gids) == ("mlx5_0/1", "ACTIVE", "ens5f0", ["IB/RoCE v1", "RoCE v2"])
    assert (first.gbit_per_s, second.gbit_per_s) == (100, None)
    assert (second.state, parse_rdma(HDR.format("2: INIT"))[0].nic) == ("DOWN", None)
    assert parse_rdma("") == []
    with pytest.raises(ValueError, match="Allowed: device, port"):
        parse_rdma("mlx5_0\n")


def test_rdma_libraries_where_a_card_is_and_nothing_the_second_time():
    one = site(None, links=parse_rdma(CX6))
    assert commands(rdma.plan(one, one.targets[1]))[1].endswith("install rdma-core ibverbs-utils'")
    one = site(None, links=parse_rdma(CX6), packages={"rdma-core": "50", "ibverbs-utils": "50"})
    assert rdma.plan(one, one.targets[1]) == Nothing("mlx5_0/1, mlx5_1/1 can be used")
    one = site(None)
    assert rdma.plan(one, one.targets[1]) == Nothing("it has no RDMA card")


def test_the_rdma_check_judges_the_links():
    assert rdma_check.judge_links(parse_rdma(CX6), "ens5f0").passed
    down = rdma_check.judge_links(parse_rdma(CX6), "ens5f1")
    assert (down.passed, "cable of ens5f1" in down.advice) == (False, True)
    assert rdma_check.judge_links(parse_rdma(HDR.format("4: ACTIVE")), "eno1").passed
    for nic in ("eno1", None):
        assert "subnet manager" in rdma_check.judge_links(parse_rdma(HDR.format("2: INIT")), nic).advice
    assert rdma_check.judge_links(parse_rdma(HDR.format("1: DOWN")), "eno1").passed is False
    assert "RoCE v2" in rdma_check.judge_links(parse_rdma(CX6.replace("RoCE v2,", "")), "ens5f0").says
    one = site(None, answers={ADDRESSES.name: {"ens5f0": ["10.0.0.2"]}}, links=parse_rdma(CX6))
    assert rdma_check.run(one, one.targets[1]).passed
