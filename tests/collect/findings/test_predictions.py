"""The score of the planner: predictions beside runs against what the runs measured, by strategy and category."""

import json

import pytest
import support_collect as support
from support_planner import cell

from collect import summary
from collect.cli import main
from collect.findings import prediction_scores
from collect.metrics.prediction_score import ComparedPrediction
from collect.reading import load
from collect.report import summary_tables
from jobs.planner import calibration, gpu, predict
from jobs.planner.calibration import MeasuredRatio
from jobs.planner.machine import PlannedMachine
from shardlab.files import files
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.cell import Instruments
from shardlab.record_types import Spread
from shardlab.runs import prediction
from shardlab.runs.prediction import PredictedRange, Prediction, make_exact_range
from shardlab.workspace import measured_power
from shardlab.workspace.workspace import Workspace

GPU = Gpu(uuid="GPU-0", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 << 30)
WATTS = 300.0


def predicted(**changes):
    """A prediction of 10 GB and of 1 s and 100 J per step: a run of 100 steps takes 100 s and, at 100 W, 10 kJ."""
    known = {
        "step_s": PredictedRange(0.5, 1.0, 1.5), "tensor_bytes": make_exact_range(10e9), "formula_tensor_bytes": 9e9,
        "memory_by_category": {"parameter": make_exact_range(4e9), "activation": PredictedRange(1e9, 2e9, 4e9)},
        "sent_bytes": 3e6, "time_s": PredictedRange(50.0, 100.0, 200.0), "energy_kwh": make_exact_range(10e3 / 3.6e6),
    }  # fmt: skip
    return Prediction(**(known | changes))


def completed(workspace, cell, repeat, step_ms, *, what=None, **found):
    """Write a completed run on one GPU that draws WATTS. step_ms: the median step time in its result."""
    results = {
        "step_time_ms": Spread(step_ms, step_ms, step_ms, step_ms, 10), "peak_memory_bytes": {"allocated": 12_000_000_000},
        "communication_bytes": {"counted": 6e6, "theory": 1.0}, "gpus": ["GPU-0"], **found,
    }  # fmt: skip
    run = support.completed(workspace, cell, repeat, rehearsal=False, gpus=[GPU], gpu={"power_w": WATTS}, found=results)
    files.write_json(prediction.find_prediction_path(run.path), what or predicted())
    return run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("scores"))
    ddp, pipeline = (
        support.cell("ddp", 2),
        support.cell("pp-gpipe", 2, pp=2, dp=1, instruments=Instruments(memory="categories")),
    )
    support.keep(made, [ddp, pipeline], repeats=2)
    completed(made, ddp, 1, 1200.0)
    completed(made, ddp, 2, 2000.0)
    memory = {
        "memory": {"peak_bytes": {"parameter": 4e9, "activation": 5e9, "unknown": 1}, "cost_s": 0.0, "steps": [], "step": 1}
    }
    completed(made, pipeline, 1, 500.0, instruments=memory)
    without = completed(made, pipeline, 2, 500.0)
    prediction.find_prediction_path(without.path).unlink()
    return made


def scores(workspace):
    return {
        (one.strategy, one.category): one for one in summary.summarize(load.load_matrix(workspace, None), "ddp").predictions
    }


def test_step_times_are_scored_by_strategy(workspace):
    ddp, pipeline = (scores(workspace)[name, "step time"] for name in ("ddp", "pp-gpipe"))
    assert (ddp.n, ddp.predicted, ddp.measured, ddp.unit) == (2, 1.0, 1.6, "s")
    assert (ddp.ratio, ddp.ratio_low, ddp.ratio_high) == (pytest.approx(1.6), 1.2, 2.0)
    assert ddp.error_pct == pytest.approx((20 + 100) / 2)
    assert ddp.within == 1  # 1.2 s is between 0.5 s and 1.5 s, 2 s is not
    assert (pipeline.n, pipeline.ratio, pipeline.error_pct, pipeline.within) == (1, 0.5, 50.0, 1)  # one run has no prediction


def test_memory_is_scored_as_a_whole_and_by_category(workspace):
    found = scores(workspace)
    assert found["ddp", "memory"].ratio == pytest.approx(1.2)
    assert (found["pp-gpipe", "memory: parameter"].ratio, found["pp-gpipe", "memory: activation"].ratio) == (1.0, 2.5)
    assert found["pp-gpipe", "memory: activation"].within == 0
    assert {category for strategy, category in found if category.startswith("memory:")} == {
        "memory: parameter",
        "memory: activation",
    }


def test_traffic_is_that_of_all_ranks_and_not_scored_for_a_pipeline(workspace):
    found = scores(workspace)
    assert (found["ddp", "traffic"].predicted, found["ddp", "traffic"].measured) == (6e6, 6e6)
    assert (found["ddp", "traffic"].error_pct, found["ddp", "traffic"].within) == (0.0, 2)
    assert ("pp-gpipe", "traffic") not in found


def test_energy_is_that_of_a_step(workspace):
    """The GPU draws 300 W. The expected energy of a step is computed from the times of the step records (about 59 ms)."""
    run = load.load_matrix(workspace, None).cells[0].completed_runs[0]
    first, last = run.timed_window
    measured = WATTS * (last - first) / (run.world_steps.height - 1)
    both = [
        one.metrics["energy_over_prediction"]
        for one in summary.summarize(load.load_matrix(workspace, None), "ddp").rows[0].runs
    ]
    assert both[0] == pytest.approx(measured / 100)
    assert scores(workspace)["ddp", "energy"].unit == "J"


def test_the_sizes_of_several_workloads_are_not_mixed(tmp_path):
    """Their ratios are scored together, but a median of a small and a large model is the size of neither."""
    workspace, cells = Workspace(tmp_path), [support.cell("ddp", 2), support.cell("ddp", 2, workload="gpt2")]
    support.keep(workspace, cells, repeats=1)
    completed(workspace, cells[0], 1, 1200.0)
    completed(workspace, cells[1], 1, 1400.0)
    step_time = scores(workspace)["ddp", "step time"]
    assert (step_time.n, step_time.predicted, step_time.measured) == (2, None, None)
    assert step_time.ratio == pytest.approx(1.3)
    (row,) = summary_tables.make_score_table([step_time]).texts
    assert row[:6] == ["ddp", "step time", "2", "", "", "1.30"]


def test_a_rehearsal_shows_no_speed_but_its_traffic_counts(tmp_path):
    workspace, cell = Workspace(tmp_path), support.cell("ddp", 2)
    support.keep(workspace, [cell], repeats=1)
    run = completed(workspace, cell, 1, 1200.0)
    files.write_json(run.result, {**json.loads(run.result.read_text()), "rehearsal": True})
    assert {"step time"}.isdisjoint(category for _, category in scores(workspace))
    assert scores(workspace)["ddp", "traffic"].ratio == 1.0


def test_the_terminal_the_page_and_the_tables_show_the_score(workspace, capsys):
    assert main(["summarize", "-v", "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    assert summary_tables.PREDICTIONS_TITLE.lower() in shown
    row = next(line for line in shown.splitlines() if "step time" in line and "ddp" in line)
    assert "1.00 s" in row
    assert "1.60 s" in row
    assert "1 of 2" in row
    page = (workspace.path / "report/index.html").read_text()
    assert f">{summary_tables.PREDICTIONS_TITLE}<" in page
    assert '<td>memory: activation</td><td class="number">1</td><td class="number">1.86 GiB</td>' in page
    written = json.loads((workspace.path / "report/summary.json").read_text())["predictions"]
    assert [one["category"] for one in written if one["strategy"] == "ddp"] == ["step time", "memory", "traffic", "energy"]


def test_summarize_keeps_the_power_of_gpus_and_the_next_plan_uses_it(workspace, capsys):
    """Each cell has two ranks, and the one GPU of the records draws 300 W, so a rank draws 150 W."""
    assert main(["summarize", "-v", "--workspace", str(workspace.path)]) == 0
    watts = measured_power.read_all_powers(workspace)
    assert len(watts) == 4
    assert list(watts.values()) == pytest.approx([WATTS / 2] * 4)
    one = cell("gpt2-tiny", "ddp", 2, micro=4)
    where = PlannedMachine(True, "a100-80gb", gpu.must_find_gpu_model("a100-80gb"))
    earlier = calibration.build_calibration([MeasuredRatio(one, "a100-80gb", None, None, next(iter(watts.values())))])
    plain, calibrated = (
        predict.predict_run(one, where, recorded_s=3600.0),
        predict.predict_run(one, where, recorded_s=3600.0, calibration=earlier),
    )
    assert plain.energy_kwh.likely == pytest.approx(2 * 0.75 * 0.4)  # the board of an A100 takes at most 400 W
    assert calibrated.energy_kwh.likely == pytest.approx(2 * 0.15)
    assert calibrated.energy_kwh.low < calibrated.energy_kwh.likely < calibrated.energy_kwh.high
    assert "energy: power of the GPUs, calibrated by 1 run(s) of ddp" in calibrated.how
    (workspace.shardlab_folder / "power" / "quickstart.json").write_text('{"schema": 1, "watts_per_gpu": {"a": -1.0}}')
    assert measured_power.read_all_powers(workspace) == {}


def test_without_predictions_there_is_no_table(tmp_path):
    workspace, cell = Workspace(tmp_path), support.cell()
    support.keep(workspace, [cell], repeats=1)
    support.completed(workspace, cell)
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    assert found.predictions == []
    assert "predictions" not in {table.name for table in summary_tables.make_text_tables(found)}


@pytest.mark.parametrize(("measured", "within"), [(0.999, 1), (1.001, 1), (0.998, 0), (1.002, 0)])
def test_a_prediction_without_a_range_may_leave_out_a_thousandth(measured, within):
    pair = ComparedPrediction("memory: optimizer_state", "bytes", make_exact_range(1e6), measured * 1e6)
    assert prediction_scores._score_category("ddp", pair.category, [pair], has_sizes=True).within == within
