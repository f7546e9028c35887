"""Results of `make gpu-proof` calibrate predictions of the planner, for cells that no run of the workspace has measured."""

import json

import msgspec
import pytest
from support_collect import environment, prepare
from support_planner import cell

from jobs.planner import calibration, gpu, gpu_results, link, memory, step_time
from jobs.planner.calibration import MeasuredRatio
from jobs.planner.machine import PlannedMachine
from jobs.planning import plan_predictions
from shardlab.files import files
from shardlab.hardware.nvml import Gpu
from shardlab.workspace.workspace import Workspace

ONE = cell("gpt2-large", "single", 1, micro=8, precision="bf16")
A100 = "NVIDIA A100-SXM4-80GB"


def machine(name):
    found = gpu.must_find_gpu_model(name)
    return PlannedMachine(True, name, found, gpu.find_gpu_memory(found, None), link.make_data_sheet_link(found))


def results(folder, *lines, name=A100):
    """Makes docs/results in a workspace, as `make gpu-proof` writes it."""
    kept = folder / "docs" / "results" / "2026-11-24-gpu"
    files.make_folder(kept)
    run = prepare(Workspace(folder / "other"), cell("gpt2-tiny"))
    environment(run, gpus=[Gpu(uuid="GPU-0", name=name, memory_bytes=80 << 30)])
    (kept / "HOST.json").write_bytes(run.environment_file("node0").read_bytes())
    (kept / "proof.jsonl").write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return gpu_results.list_result_folders(folder)[:1]


def record(stage="D", verdict="holds", **figures):
    return {"stage": stage, "name": "x", "verdict": verdict, "cell": msgspec.to_builtins(ONE), **figures}


def test_the_ratio_is_that_to_the_formula(tmp_path):
    """The calibration is the measured value divided by the value of the formula."""
    formula_s = step_time.predict_step_time(ONE, machine(A100)).step_s.likely
    needed = memory.predict_memory(ONE, on_gpu=True).tensor_bytes.likely
    kept = results(tmp_path, record(step_ms=1300 * formula_s, peak_allocated_bytes=round(0.9 * needed)))
    (found,) = gpu_results.read_proof_ratios(kept)
    assert (found.time_ratio, found.memory_ratio) == (pytest.approx(1.3), pytest.approx(0.9))
    assert found.cell == ONE


def test_a_plan_uses_results_until_a_run_of_the_workspace_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_results, "CHECKOUT_RESULTS", tmp_path / "none")  # hides this repository's own docs/results
    formula = step_time.predict_step_time(ONE, machine(A100))
    results(tmp_path, record(step_ms=1300 * formula.step_s.likely))
    earlier = plan_predictions.load_calibration(Workspace(tmp_path))
    span, how = earlier.correct_time(ONE, "a100-80gb", formula)  # the GPU's name in a cluster file
    assert span.likely == pytest.approx(1.3 * formula.step_s.likely)
    assert how == ", calibrated by 1 result(s) in docs/results of this step"
    assert earlier.correct_time(ONE, "h100", formula) == (formula.step_s, "")
    own = calibration.build_calibration([MeasuredRatio(ONE, A100, 1.1, None)], fallback=earlier)
    span, how = own.correct_time(ONE, A100, formula)
    assert (span.likely, how) == (pytest.approx(1.1 * formula.step_s.likely), ", calibrated by 1 run(s) of this step")


@pytest.mark.parametrize(
    "line",
    [
        record("A", step_ms=10.0),
        record("B", step_ms=10.0),
        record(verdict="dropped", step_ms=10.0),
        record(),
        {**record(step_ms=10.0), "cell": {"workload": "x"}},
        {**record(), "step_ms": "x"},
        "not JSON\n",
    ],
    ids=["cold", "shared GPU", "dropped", "no figure", "cell of another version", "no number", "damaged"],
)
def test_a_record_without_a_measurement_of_one_gpu_per_rank_is_left_out(tmp_path, line):
    good = record(step_ms=10.0)
    assert len(list(gpu_results.read_proof_ratios(results(tmp_path, line, good)))) == 1


def test_the_results_of_this_repository_correct_predictions_only_a_little():
    """A record of something else, such as two models in one process, would spoil the predictions of every user."""
    found = list(gpu_results.read_proof_ratios([gpu_results.CHECKOUT_RESULTS]))
    assert len([one.time_ratio for one in found if one.time_ratio]) >= 7
    assert all(0.8 < ratio < 1.25 for one in found for ratio in (one.time_ratio, one.memory_ratio) if ratio), found


def test_a_machine_whose_gpu_is_not_known_calibrates_nothing(tmp_path):
    assert list(gpu_results.read_proof_ratios(results(tmp_path, record(step_ms=10.0), name="Abacus 3000"))) == []
    (tmp_path / "docs/results/2026-11-24-gpu/HOST.json").write_text("{half")
    assert list(gpu_results.read_proof_ratios(gpu_results.list_result_folders(tmp_path)[:1])) == []


def test_a_result_that_cannot_be_read_is_left_out(tmp_path):
    (folder,) = results(tmp_path, record(step_ms=10.0))
    (proof,) = folder.glob("*/proof.jsonl")
    assert list(gpu_results.read_proof_ratios([folder]))
    proof.unlink()
    proof.mkdir()
    assert list(gpu_results.read_proof_ratios([folder])) == []
