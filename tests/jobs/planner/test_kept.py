"""Predictions that are stored in run folders: how measured runs correct later predictions, and what `jobs plan` and `jobs
advise` print."""

import json
import re
from functools import partial

import msgspec
from support_planner import cell

from collect.loading.loaded_run import LoadedRun
from collect.metrics import prediction_score
from jobs.cli import main
from jobs.planner import cell_schedule
from jobs.planning import plan_predictions
from shardlab.files import files
from shardlab.matrix.cell import Cell
from shardlab.record_types import Spread
from shardlab.runs import prediction
from shardlab.runs.prediction import Prediction, make_exact_range
from shardlab.runs.record import Result
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

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
        tensor_bytes=make_exact_range(25e9),
        step_s=make_exact_range(0.4),
        gpu="a100",
        formula_step_s=0.5,
        formula_tensor_bytes=16e9,
    )
    files.write_json(prediction.find_prediction_path(run.path), predicted)
    return run, result


def test_the_score_is_measured_over_predicted(tmp_path):
    run, result = measured(tmp_path)
    loaded = LoadedRun(run, run=run.read_run(), result=result)
    time, memory = (partial(prediction_score.divide_by_prediction, category=name) for name in ("step time", "memory"))
    assert time(loaded).value == 0.6 / 0.4
    assert memory(loaded).value == 20 / 25
    prediction.find_prediction_path(run.path).write_text("{damaged")
    assert time(LoadedRun(run, run=loaded.run, result=result)) is None
    prediction.find_prediction_path(run.path).unlink()
    assert memory(LoadedRun(run, run=loaded.run, result=result)) is None


def test_the_next_plan_is_calibrated_by_the_stored_prediction(tmp_path):
    run, result = measured(tmp_path)
    (ratio,) = plan_predictions.read_run_ratios(Workspace(tmp_path))
    assert (ratio.gpu_name, ratio.time_ratio, ratio.memory_ratio) == ("a100", 0.6 / 0.5, 20 / 16)
    files.write_json(run.result, msgspec.structs.replace(result, rehearsal=True))
    assert not list(plan_predictions.read_run_ratios(Workspace(tmp_path)))


def test_a_plan_names_cells_that_do_not_fit_and_the_cost_of_the_others(tmp_path, capsys):
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


# Table of study 4: (stages, micro-batches) -> (bubble in percent, total, ideal, throughput)
STUDY_4 = {
    (2, 4): ("20.0", 15, 12, "0.267"), (2, 8): ("11.1", 27, 24, "0.296"), (2, 16): ("5.9", 51, 48, "0.314"),
    (2, 32): ("3.0", 99, 96, "0.323"), (2, 64): ("1.5", 195, 192, "0.328"), (4, 4): ("42.9", 21, 12, "0.190"),
    (4, 8): ("27.3", 33, 24, "0.242"), (4, 16): ("15.8", 57, 48, "0.281"), (4, 32): ("8.6", 105, 96, "0.305"),
    (4, 64): ("4.5", 201, 192, "0.318"), (8, 4): ("63.6", 33, 12, "0.121"), (8, 8): ("46.7", 45, 24, "0.178"),
    (8, 16): ("30.4", 69, 48, "0.232"), (8, 32): ("17.9", 117, 96, "0.274"), (8, 64): ("9.9", 213, 192, "0.300"),
}  # fmt: skip


def test_a_plan_of_study_4_draws_a_pipeline_with_the_numbers_of_its_table(tmp_path, capsys):
    words = [
        "plan",
        "--matrix",
        "paper4",
        "--workspace",
        str(tmp_path),
        "--where",
        "strategy == 'pp-gpipe' and gpus > 1 and workload == 'gpt2'",
    ]
    assert main([*words, "--schedule", "x"]) == 2
    said = capsys.readouterr().err
    assert "--schedule: unknown cell with a pipeline 'x'" in said
    name = next(word.strip(",") for word in said.split("Allowed:")[1].split() if "-g4-b64-a8-" in word)
    assert main([*words, "--schedule", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    (begin,) = (at for at, line in enumerate(lines) if line.startswith(f"{name}: gpipe, 4 ranks, 4 stages, 8 micro-batches"))
    assert [line.split()[:2] for line in lines[begin + 1 : begin + 5]] == [["rank", str(rank)] for rank in range(4)]
    assert "total 33.0, ideal 24.0, bubble 27.3%, throughput 0.242 micro-batches per unit" in lines[begin + 5]
    assert main([*words, "--json", "--schedule", name]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schedule"]["bubble"] == 9 / 33
    found = {}
    for entry in shown["cells"]:
        drawn = cell_schedule.make_schedule(msgspec.convert(entry["cell"], Cell))
        figures = (f"{100 * drawn.bubble:.1f}", drawn.total, drawn.ideal, f"{drawn.throughput:.3f}")
        found[drawn.stages, drawn.micro_batches] = figures
    assert found == STUDY_4


def test_only_a_pipeline_has_a_schedule(tmp_path, capsys):
    words = ["plan", "--matrix", "quickstart", "--workspace", str(tmp_path), "--where", "strategy == 'ddp'"]
    assert main([*words, "--schedule", "x"]) == 2
    assert "no selected cell of quickstart has a pipeline" in capsys.readouterr().err


def test_a_rendered_run_keeps_its_prediction(tmp_path, capsys):
    assert main(["render", "--matrix", "quickstart", "--workspace", str(tmp_path)]) == 0
    folders = [folder for folder in (tmp_path / "runs").iterdir() if folder.name[0] != "."]
    kept = [prediction.read_prediction(folder) for folder in folders]
    assert kept
    assert all(found.memory_bytes.likely > 0 and found.fits is None for found in kept)


def test_the_throughput_of_an_advice_has_a_range(capsys):
    assert main(["advise", "--workload", "gpt2", "--gpus", "8", "--gpu", "a100", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["strategies"][0]
    assert 0 < best["range_per_s"]["low"] < best["items_per_s"] < best["range_per_s"]["high"]


def test_advice_marks_a_rule_of_a_study_with_which_the_planner_disagrees(capsys):
    """Between two nodes with 1 Gbit/s, ZeRO-2 of a model with 7 B parameters mostly waits for its gradients."""
    assert main(["advise", "--workload", "gpt2-large", "--gpus", "8", "--gpu", "a100-80gb", "--link", "nvlink"]) == 0
    agrees = capsys.readouterr().out.partition("The planner agrees with")[2].partition("DISAGREES")[0]
    assert "study 2, section 5.2.3" in " ".join(agrees.split())
    words = ["--workload", "llm-7b", "--gpus", "16", "--nodes", "2", "--gpu", "a100-80gb", "--between-nodes", "ethernet-1"]
    assert main(["advise", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"DISAGREES with study 1, figure 6 \(zero2 has only \d+ % of the highest throughput\)", said)
