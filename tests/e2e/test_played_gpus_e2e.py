"""A stub of NVML plays eight GPUs in a rehearsal. Every GPU panel of the report is drawn and marked; no metric uses them."""

import os

import pytest
import support_report
from support_e2e import HANG_S, benches
from support_sampler import ended, records, sampled, start

from collect.figures import telemetry
from collect.metric import load_metrics
from jobs.node.node_processes import PLAYED_NVML_VARIABLE
from shardlab.runs.record import Sample, read_records

pytest_plugins = ["support_nvml"]
UUIDS = [f"GPU-{number}-played" for number in range(8)]
GIB = 2**30
# Counters that grow by 10 MB/s, and 300 J/s of energy.
ANSWERS = {
    "utilization": 90, "memory_total": 80 * GIB, "memory_used": 60 * GIB, "temperature": 60, "sm_clock": 1980,
    "memory_clock": 2619, "pcie_tx": "0+10000000", "pcie_rx": "0+10000000", "nvlink_tx_kib": "0+10000",
    "nvlink_rx_kib": "0+10000", "ecc_corrected": 0, "ecc_uncorrected": 0,
}  # fmt: skip


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


@pytest.fixture
def playing(nvml):
    """The environment in which a sampler finds the stub: eight GPUs, of which one is lost and one has a MIG instance."""
    nvml.say(UUIDS, power_w=300.0, of={6: {"lost": 1}}, mig={7: {"MIG-7": 5 * GIB}}, xids=[(0, 79)], **ANSWERS)
    library = nvml.environment["LD_LIBRARY_PATH"].partition(os.pathsep)[0] + "/libnvidia-ml.so.1"
    return {"STUB_NVML": nvml.environment["STUB_NVML"], PLAYED_NVML_VARIABLE: library}


def test_the_sampler_marks_every_gpu_that_a_stub_plays(tmp_path, playing):
    out = tmp_path / "node.jsonl"
    process = start(out, "--json", "--played", playing[PLAYED_NVML_VARIABLE], STUB_NVML=playing["STUB_NVML"])
    sampled(process, out, 2)
    ended(process)
    first, second = records(out)[:2]
    assert [(gpu.uuid, gpu.played) for gpu in first.gpus] == [(uuid, True) for uuid in [*UUIDS, "MIG-7"]]
    assert first.gpus[0].memory_total_bytes == 80 * GIB
    assert second.gpus[0].memory_total_bytes is None


@pytest.mark.parametrize("content", [None, "no library"])
def test_a_stub_that_cannot_be_loaded_is_refused(tmp_path, content):
    library = tmp_path / "stub.so"
    if content is not None:
        library.write_text(content)
    process = start(tmp_path / "node.jsonl", "--played", str(library))
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert f"--played: {library}: " in errors
    assert not (tmp_path / "node.jsonl").exists()


@pytest.mark.e2e
def test_a_rehearsal_shows_every_panel_of_gpus_marked_as_played(bench, playing):
    name = bench.matrix(
        "axes: {strategy: [single]}\nclaims:\n  - {id: c, says: s, test: energy_j(gpus=1) > 0, where: here}", steps=100
    )
    path = bench.path / "small.yaml"
    path.write_text(path.read_text().replace("defaults:", "defaults:\n  instruments: {telemetry_hz: 20}"))
    bench.run("jobs", "submit", "--matrix", name, "--wait", env=os.environ | playing)
    (folder,) = bench.folders()
    (samples,) = (folder.path / "samples").glob("*.jsonl")
    assert {gpu.played for sample in read_records(samples, Sample).records for gpu in sample.gpus} == {True}
    summary = bench.json("collect", "summarize")
    page = (bench.path / "report" / "index.html").read_text()
    figures = support_report.unpack(page, "specs")
    for title in [panel.title for panel in (*telemetry.GPU_PANELS, *telemetry.SHARED_GPU_PANELS)]:
        assert f'"{title}, played"' in figures, title
    assert f"{UUIDS[0][:12]}, played" in figures + page
    assert "Played: the GPUs of single ×1" in page
    assert any(remark.startswith("played GPUs: ") and folder.run_id in remark for remark in summary["remarks"])
    (row,) = summary["rows"]
    of_gpus = {metric.name for metric in load_metrics() if "NVML" in metric.definition}
    assert {"energy_j", "gpu_pct", "gpu_memory_pct", "idle_power_w"} <= of_gpus
    assert not of_gpus & row["metrics"].keys()
    assert [verdict["verdict"] for verdict in summary["verdicts"]] == ["not run"]
    assert summary["telemetry"][0].get("lost_gpus") is None
    assert not row["runs"][0].get("gpu_trouble")
