"""Predictions that are stored in run folders: how measured runs correct later predictions, and what `jobs plan` and `jobs
advise` print."""

import json

import msgspec
from support_planner import cell

from collect.loading.loaded_run import LoadedRun
from collect.metrics import prediction_score
from jobs import plan_predictions
from jobs.cli import main
from shardlab import files, prediction
from shardlab.prediction import Prediction, exactly
from shardlab.record import Result, Spread
from shardlab.run import Run, World
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

CLUSTER = """\
schema: 1
name: site
provider: ssh
nodes: [{name: gpu0, host: 127.0.0.1, roles: [controller, worker]}]
gpus: {type: a100, per_node: 8, memory_gib: 40}
price_per_gpu_hour: 2.0
storage: {shared: /scratch/a}
slurm: {}
"""
MATRIX = """\
schema: 1
name: m
defaults: {workload: llm-7b, gpus: 8, gpu_batch_size: 1, steps: 2, precision: bf16}
axes: {strategy: [fsdp2, ddp]}
"""


def measured(folder):
    """Makes the folder of a completed run of GPT-2 Large. The formula predicted 0.5 s per step and 16 GB; measured were 0.6 s
    and 20 GB."""
    one = cell("gpt2-large", "ddp", 8, micro=8, precision="bf16")
    run = RunDir(folder / "runs" / "a-r1")
    files.make_folder(run.path)
    files.write_json(run.run_json, Run(
        schema=1, run_id="a-r1", matrix="m", cell=one, cell_hash=one.hash(), repeat=1, attempt=1, launcher="torchrun",
        rehearsal=False, world=World(1, 8, 8), cluster={}, data_path="/d", versions={}, git_commit=None, templates={},
        created="2026-01-01T00:00:00Z",
    ))  # fmt: skip
    result = Result(
        schema=1, run_id="a-r1", state="completed", rehearsal=False, steps=10, unit="tokens",
        step_time_ms=Spread(600.0, 600.0, 600.0, 600.0, 10), peak_memory_bytes={"allocated": 20_000_000_000},
    )  # fmt: skip
    files.write_json(run.result, result)
    predicted = Prediction(
        tensor_bytes=exactly(25e9), step_s=exactly(0.4), gpu="a100", formula_step_s=0.5, formula_tensor_bytes=16e9
    )
    files.write_json(prediction.path_in(run.path), predicted)
    return run, result


def test_the_score_is_measured_over_predicted(tmp_path):
    run, result = measured(tmp_path)
    loaded = LoadedRun(run, result=result)
    assert prediction_score.step_over_prediction(loaded).value == 0.6 / 0.4
    assert prediction_score.memory_over_prediction(loaded).value == 20 / 25
    prediction.path_in(run.path).write_text("{damaged")
    assert prediction_score.step_over_prediction(loaded) is None
    prediction.path_in(run.path).unlink()
    assert prediction_score.memory_over_prediction(loaded) is None


def test_the_next_plan_is_calibrated_by_what_the_formula_said(tmp_path):
    run, result = measured(tmp_path)
    (ratio,) = plan_predictions.measured(Workspace(tmp_path))
    assert (ratio.gpu, ratio.time, ratio.memory) == ("a100", 0.6 / 0.5, 20 / 16)
    files.write_json(run.result, msgspec.structs.replace(result, rehearsal=True))
    assert not list(plan_predictions.measured(Workspace(tmp_path)))


def test_a_plan_says_what_does_not_fit_and_what_the_others_cost(tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "m.yaml").write_text(MATRIX)
    words = ["--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["plan", *words, "--json"]) == 0
    fsdp2, ddp = (entry["predicted"] for entry in json.loads(capsys.readouterr().out)["cells"])
    assert (fsdp2["fits"], ddp["fits"]) == ("yes", "no")
    assert ddp["largest_micro_batch"] == 0
    assert fsdp2["memory_bytes"]["low"] <= fsdp2["memory_bytes"]["likely"] <= fsdp2["memory_bytes"]["high"]
    assert fsdp2["cost"]["likely"] == 2 * fsdp2["gpu_hours"]["likely"]
    assert fsdp2["bottleneck"] == "compute"
    assert main(["plan", *words, "--scale-out", "16,x"]) == 2
    assert "Allowed: numbers of GPUs" in capsys.readouterr().err


def test_a_rendered_run_keeps_its_prediction(tmp_path, capsys):
    assert main(["render", "--matrix", "quickstart", "--workspace", str(tmp_path)]) == 0
    folders = [folder for folder in (tmp_path / "runs").iterdir() if folder.name[0] != "."]
    kept = [prediction.read(folder) for folder in folders]
    assert kept
    assert all(found.memory_bytes.likely > 0 and found.fits is None for found in kept)


def test_advise_refuses_unknown_names(capsys):
    words = ["advise", "--workload", "gpt2", "--gpus", "8"]
    assert main([*words, "--gpu", "abacus"]) == 2
    assert "a100" in capsys.readouterr().err
    assert main([*words, "--gpu", "a100", "--nodes", "2"]) == 2
    assert "--link" in capsys.readouterr().err
    assert main([*words, "--gpu", "a100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategies"][0]["items_per_s"] > 0
