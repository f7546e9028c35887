"""How the sampler records GPUs: its real NVML binding loads a stub library, which has the symbols of NVML."""

import pytest
from support_sampler import ended, records, sampled, start

from collect.sampler.gpu import GpuSource
from shardlab.runs.record import Sample

pytest_plugins = ["support_nvml"]
EIGHT = [f"GPU-{number}" for number in range(8)]
EVERYTHING = {
    "utilization": 93,
    "memory_total": 80 << 30,
    "memory_used": 60 << 30,
    "temperature": 61,
    "sm_clock": 1980,
    "memory_clock": 2619,
    "pcie_tx": 5 << 33,
    "pcie_rx": 6 << 33,
    "nvlink_tx_kib": 7 << 33,
    "nvlink_rx_kib": 8 << 33,
    "ecc_corrected": 3,
    "ecc_uncorrected": 1,
}


def test_a_machine_without_a_gpu_has_no_gpu_field():
    source = GpuSource()
    if source.why_absent is None:
        pytest.skip("this machine has a GPU")
    sample = Sample(schema=1, t_s=0, wall_s=0, host="h", boot_id="b")
    source.fill(sample)
    assert sample.gpus is None
    assert "NVML" in source.why_absent


def test_all_fields_of_eight_gpus_are_recorded(tmp_path, nvml):
    nvml.say(EIGHT, power_w=612.5, energy_j=1234.5, reasons=0x04 | 0x40 | 0x01, processes={7: [7, 8]}, **EVERYTHING)
    process = start(tmp_path / "node.jsonl", "--hz", "10", "--json", **nvml.environment)
    sampled(process, tmp_path / "node.jsonl")
    told = ended(process)
    gpus = records(tmp_path / "node.jsonl")[0].gpus
    assert [gpu.uuid for gpu in gpus] == EIGHT
    assert [gpu.processes for gpu in gpus] == [0] * 7 + [2]
    gpu = gpus[3]
    assert (gpu.utilization_pct, gpu.memory_used_bytes, gpu.power_w, gpu.energy_j) == (93, 60 << 30, 612.5, 1234.5)
    assert (gpu.temperature_c, gpu.sm_clock_mhz, gpu.memory_clock_mhz) == (61, 1980, 2619)
    assert (gpu.pcie_tx_bytes, gpu.pcie_rx_bytes) == (5 << 33, 6 << 33)
    assert (gpu.nvlink_tx_bytes, gpu.nvlink_rx_bytes) == (7 << 43, 8 << 43)  # NVML reports KiB, and the record has bytes
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (3, 1)
    assert gpu.throttled == ["power cap", "hardware thermal slowdown"]
    assert (gpu.lost, gpu.xids, gpu.mig_of) == (False, None, None)
    assert (told["failures"], told["unsupported"], told["remarks"]) == ({}, {}, [])


def test_a_question_that_a_gpu_does_not_support_is_asked_once_and_gives_no_number(tmp_path, nvml):
    """The stub supports few queries: power, energy, throttling and processes on both GPUs, and utilization on GPU-1 only."""
    calls = tmp_path / "calls.txt"
    nvml.say(EIGHT[:2], power_w=250.5, of={1: {"utilization": 0}})
    process = start(tmp_path / "node.jsonl", "--hz", "50", "--json", STUB_NVML_CALLS=str(calls), **nvml.environment)
    sampled(process, tmp_path / "node.jsonl", 5)
    told = ended(process)
    every = records(tmp_path / "node.jsonl")
    for zero, one in (sample.gpus for sample in every):
        assert (zero.utilization_pct, one.utilization_pct, zero.power_w, one.power_w) == (None, 0, 250.5, 250.5)
        unknown = (zero.memory_used_bytes, zero.temperature_c, zero.sm_clock_mhz, zero.pcie_tx_bytes, zero.ecc_uncorrected)
        assert unknown == (None,) * 5
    asked = calls.read_text().splitlines()
    assert asked.count("GPU-0 utilization") == asked.count("GPU-1 temperature") == asked.count("GPU-1 nvlink_tx_kib") == 1
    assert asked.count("GPU-1 utilization") >= len(every) > 4
    assert told["failures"] == {}
    assert told["unsupported"] == {
        "gpu utilization": 1,
        "gpu memory": 2,
        "gpu temperature": 2,
        "gpu SM clock": 2,
        "gpu memory clock": 2,
        "gpu corrected ECC errors": 2,
        "gpu uncorrected ECC errors": 2,
        "gpu PCIe bytes sent": 2,
        "gpu PCIe bytes received": 2,
        "gpu NVLink bytes sent": 2,
        "gpu NVLink bytes received": 2,
    }


def test_an_old_driver_without_the_fields_still_gives_the_rest(tmp_path, old_nvml):
    old_nvml.say(EIGHT[:1], **EVERYTHING)
    process = start(tmp_path / "node.jsonl", "--hz", "10", "--json", **old_nvml.environment)
    sampled(process, tmp_path / "node.jsonl", 2)
    told = ended(process)
    (gpu,) = records(tmp_path / "node.jsonl")[-1].gpus
    assert (gpu.utilization_pct, gpu.processes, gpu.pcie_tx_bytes) == (93, 0, None)
    assert told["unsupported"]["gpu PCIe bytes sent"] == 1


def test_a_counter_of_pcie_that_wraps_between_samples_gives_no_number(tmp_path, nvml):
    out = tmp_path / "node.jsonl"
    nvml.say(EIGHT[:1], narrow=1, **EVERYTHING | {"pcie_tx": 77})
    process = start(out, "--hz", "50", "--json", **nvml.environment)
    sampled(process, out, 3)
    told = ended(process)
    assert {gpu.pcie_tx_bytes for sample in records(out) for gpu in sample.gpus} == {None}
    assert {gpu.ecc_corrected for sample in records(out) for gpu in sample.gpus} == {3}
    assert told["unsupported"] == dict.fromkeys(
        ("gpu PCIe bytes sent (a counter of 32 bits)", "gpu PCIe bytes received (a counter of 32 bits)"), 1
    )


def test_a_lost_gpu_is_recorded_and_reported_and_the_others_are_sampled(tmp_path, nvml):
    out = tmp_path / "node.jsonl"
    nvml.say(EIGHT, power_w=300, **EVERYTHING)
    process = start(out, "--hz", "50", "--json", **nvml.environment)
    sampled(process, out, 2)
    nvml.say(EIGHT, power_w=300, of={5: {"lost": 1}}, xids=[(5, 79)], **EVERYTHING)
    sampled(process, out, 10)
    told = ended(process)
    every = records(out)
    assert [gpu.lost for gpu in every[0].gpus] == [False] * 8
    assert [gpu.lost for gpu in every[-1].gpus] == [False] * 5 + [True] + [False] * 2
    lost = every[-1].gpus[5]
    assert (lost.uuid, lost.power_w, lost.utilization_pct, lost.processes) == ("GPU-5", None, None, None)
    assert every[-1].gpus[6].power_w == 300
    assert [gpu.xids for sample in every for gpu in sample.gpus if gpu.xids] == [[79]]
    assert told["remarks"] == ["GPU-5 was lost: GPU is lost"]


def test_a_gpu_that_is_lost_at_the_start_leaves_the_others(tmp_path, nvml):
    nvml.say(EIGHT, of={0: {"lost_at_start": 1}})
    process = start(tmp_path / "node.jsonl", "--hz", "10", "--json", **nvml.environment)
    sampled(process, tmp_path / "node.jsonl")
    told = ended(process)
    assert [gpu.uuid for gpu in records(tmp_path / "node.jsonl")[0].gpus] == EIGHT[1:]
    assert told["remarks"] == ["GPU 0 cannot be sampled: GPU is lost"]


def test_each_xid_error_is_recorded_once_at_its_gpu(tmp_path, nvml):
    out = tmp_path / "node.jsonl"
    nvml.say(EIGHT, of={3: {"no_events": 1}})
    process = start(out, "--hz", "50", "--json", **nvml.environment)
    sampled(process, out)
    nvml.say(EIGHT, of={3: {"no_events": 1}}, xids=[(2, 31), (2, 94), (6, 48)])
    sampled(process, out, 5)
    told = ended(process)
    assert {gpu.uuid: gpu.xids for sample in records(out) for gpu in sample.gpus if gpu.xids} == {
        "GPU-2": [31, 94],
        "GPU-6": [48],
    }
    assert told["unsupported"]["gpu XIDs"] == 1


def test_mig_instances_have_entries_of_their_own(tmp_path, nvml):
    out = tmp_path / "node.jsonl"
    nvml.say(EIGHT[:2], mig={1: {"MIG-a": 5 << 30, "MIG-b": 6 << 30}}, of={0: {"no_mig": 1}}, **EVERYTHING)
    process = start(out, "--hz", "10", "--json", **nvml.environment)
    sampled(process, out)
    ended(process)
    seen = [(gpu.uuid, gpu.mig_of, gpu.memory_used_bytes, gpu.power_w) for gpu in records(out)[0].gpus]
    assert seen == [
        ("GPU-0", None, 60 << 30, 100.0),
        ("GPU-1", None, 60 << 30, 100.0),
        ("MIG-a", "GPU-1", 5 << 30, None),
        ("MIG-b", "GPU-1", 6 << 30, None),
    ]
