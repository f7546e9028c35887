"""The proof on several GPUs, end to end on 2, 4 and 8 fake GPUs: `provision`, runs with a rank on each GPU, and the record.

The short form leaves out 8 GPUs, whose ranks take minutes on two processors: each imports torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import build
from support_e2e import HANG_S
from support_long import only_long

from benchmarks import sampler
from shardlab.hardware.nccl_log import TIMED_STEPS_END

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
COMMAND = [sys.executable, ROOT / "benchmarks" / "gpu" / "several.py", "--tiny"]
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=f"no fake GPUs: {build.why_not()}")
NEEDS_HARDWARE = {
    "traced_bytes", "nccl_bytes", "nvlink_bytes", "pcie_bytes", "rdma_bytes", "network_bytes", "communication_ms",
    "exposed_communication_ms", "overlap_pct",
}  # fmt: skip


def make_environment(folder, gpus):
    """The environment in which NVML and the ranks see fake GPUs, which have no counters of NVLink and PCIe."""
    variables = sampler.stub(folder, gpus)
    lines = [f"gpu uuid=GPU-00000000-0000-0000-0000-{number:012d} name=NVIDIA_H100_80GB_HBM3" for number in range(gpus)]
    (folder / "gpus.txt").write_text("\n".join(lines))
    return os.environ | variables | {
        "PYTHONPATH": f"{SUPPORT / 'fake_cuda' / 'startup'}:{SUPPORT}", "FAKE_CUDA_LIBRARY": str(build.library()),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def prove(folder, gpus, where):
    """Run the proof. Returns (the completed process, the record that it kept in its workspace)."""
    workspace = folder / "workspace"
    command = [*COMMAND, "--workspace", workspace, "--out", folder / "results", "--where", where]
    done = subprocess.run(
        command, env=make_environment(folder, gpus), capture_output=True, text=True, check=False, timeout=2 * HANG_S
    )
    record = workspace / "several-gpus.json"
    assert record.exists(), done.stdout + done.stderr
    return done, json.loads(record.read_text())


@pytest.mark.parametrize(("gpus", "strategy"), [(4, "fsdp2-hsdp"), *only_long((8, "tp"))])
def test_ranks_on_several_gpus_are_proven_and_recorded(tmp_path, gpus, strategy):
    done, record = prove(tmp_path, gpus, f"strategy == '{strategy}'")
    (cell,) = [cell for cell in record["cells"] if cell["state"] != "planned"]
    assert (cell["strategy"], cell["state"], cell["work"]) == (strategy, "completed", "proven"), done.stdout + done.stderr
    assert (record["gpus_per_node"], record["nodes"], record["gpu"]) == (gpus, 1, "NVIDIA H100 80GB HBM3")
    assert cell["not_measured"].keys() >= NEEDS_HARDWARE
    assert {"step_ms", "counted_bytes", "memory_over_prediction", "step_time_over_prediction"} <= cell["numbers"].keys()
    assert cell["numbers"]["counted_bytes"] == pytest.approx(cell["numbers"]["theory_bytes"], rel=0.03)
    assert record["cuda"] is None
    assert "the GPUs may be fake" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_second_call_continues_with_the_runs_that_are_missing(tmp_path):
    _, first = prove(tmp_path, 2, "strategy == 'ddp' and precision == 'bf16'")
    assert [cell["strategy"] for cell in first["cells"] if cell["state"] == "completed"] == ["ddp"]
    assert {check["name"]: check["verdict"] for check in first["checks"]}["every cell completed"] == "not measured"
    (events,) = (tmp_path / "workspace" / "runs").glob("ddp-*-r1/events.attempt.jsonl")
    before = events.read_bytes()
    done, second = prove(tmp_path, 2, "strategy in ['ddp', 'tp'] and precision == 'bf16'")
    assert [cell["strategy"] for cell in second["cells"] if cell["state"] == "completed"] == ["ddp", "tp"], done.stdout
    assert events.read_bytes() == before  # the first run was not started again
    logs = list((tmp_path / "workspace" / "runs").glob("*/log/rank-*.log"))
    marks = ("timed steps begin", "timed steps end")
    assert [[log.read_text().count(mark) for mark in marks] for log in logs] == [[1, 1]] * 4
    command, environment = [*COMMAND[:2], "--workspace", tmp_path / "workspace"], make_environment(tmp_path, 2)
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "begun with other settings" in refused.stderr


@pytest.mark.parametrize(("subsystems", "is_written"), [("INIT,NET", False), ("INIT,NET,COLL", True), ("ALL", True)])
def test_timed_steps_are_marked_in_a_log_with_collectives(monkeypatch, capsys, subsystems, is_written):
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", subsystems)
    loop = pytest.importorskip("trainers.run.loop")
    loop.print_log_mark(TIMED_STEPS_END)
    assert (capsys.readouterr().out == f"{TIMED_STEPS_END}\n") == is_written
