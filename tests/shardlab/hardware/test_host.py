"""The description of a host (processor, GPUs, interfaces): if one part cannot be read, the other parts are still described."""

import re
from pathlib import Path

import pynvml
import pytest

from shardlab.hardware import host, nvml


def test_numa_nodes_come_in_order_with_their_processors(tmp_path):
    for node, cpus in ((10, "32-47"), (2, "0-15,16")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(cpus + "\n")
    assert host.list_numa_nodes(tmp_path) == [host.NumaNode(2, "0-15,16"), host.NumaNode(10, "32-47")]
    assert host.list_numa_nodes(tmp_path / "none") == []


def test_an_interface_has_its_driver_and_mtu(tmp_path):
    (tmp_path / "drivers" / "mlx5_core").mkdir(parents=True)
    device = tmp_path / "devices" / "0000:c5:00.0"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(tmp_path / "drivers" / "mlx5_core")
    nic = tmp_path / "net" / "ens5f0"
    (nic / "statistics").mkdir(parents=True)
    (nic / "device").symlink_to(device)
    for name, text in (("type", "1"), ("speed", "100000"), ("mtu", "9000"), ("address", "04:3f")):
        (nic / name).write_text(text + "\n")
    (found,) = host.list_nics(tmp_path / "net")
    assert (found.kind, found.driver, found.mtu, found.speed_mbps, found.pci) == (
        "physical", "mlx5_core", 9000, 100_000, "0000:c5:00.0",
    )  # fmt: skip


def test_a_machine_that_shows_no_interfaces_has_none(tmp_path):
    assert host.list_nics(tmp_path / "net") == []


def test_the_name_of_the_processor_is_that_of_proc_cpuinfo():
    """The model of the processor is the `model name` of /proc/cpuinfo. Processors of ARM have none, so their model is None."""
    named = re.findall(r"^model name\s*: (.*?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert host.read_host().cpu_model == (named[0] if named else None)


def test_the_links_of_gpus_are_recorded_and_unanswered_fields_left_out(monkeypatch):
    def refuse(*_):
        raise pynvml.NVMLError_NotSupported()

    def pci(bus):
        return type("Pci", (), {"busId": bus})

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetName": lambda _: "H200",
        "nvmlDeviceGetPciInfo": lambda gpu: pci(f"0{gpu}:00.0"),
        "nvmlDeviceGetMaxClockInfo": lambda _, which: {pynvml.NVML_CLOCK_SM: 1980}.get(which) or refuse(),
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetNvLinkState": lambda _, link: link < 3 or refuse(),
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: pci(f"0{1 - gpu}:00.0") if link else refuse(),
        "nvmlDeviceGetTopologyCommonAncestor": lambda *_: pynvml.NVML_TOPOLOGY_SYSTEM,
    }
    silent = [name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")]
    for name in silent:
        monkeypatch.setattr(pynvml, name, refuse)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    driver, (one, other), why = nvml.read_gpus()
    assert (driver, why, one.name, one.uuid, one.sm_clock_max_mhz) == ("570.1", None, "H200", "GPU-0", 1980)
    assert (one.pcie_width, one.pcie_width_max, one.pcie_generation_max) == (8, 16, None)
    assert one.nvlinks == {"unknown": 1, "01:00.0": 2}
    assert (one.paths, other.paths) == ({"GPU-1": "SYS"}, {"GPU-0": "SYS"})
    assert (one.memory_bytes, one.power_limit_w, one.memory_clock_max_mhz, one.numa_node, one.persistence) == (None,) * 5


def test_the_commit_of_this_checkout():
    commit = host.read_git_commit()
    if commit is None:
        pytest.skip("not in a git checkout")
    assert len(commit.removesuffix("-dirty")) == 40
