"""`make gpu-proof` on a fake GPU: the cells that it runs, the files that it keeps, and its message if there is no GPU."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fake_cuda import build
from support_gpu_results import problems

from benchmarks import sampler
from jobs.planning import plan
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.hardware import host
from shardlab.matrix.cell import Cell
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=f"no fake GPUs: {build.why_not()}")
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": f"{ROOT}/tests/support:{GPU}:{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def prove(folder, *words):
    """Run the GPU proof on a fake GPU. Returns (the completed process, the records that the proof wrote)."""
    command = [sys.executable, "-m", "fake_cuda.proof", build.library(), "--out", folder, *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    kept = list(folder.glob("*/proof.jsonl"))
    assert len(kept) == 1, done.stderr
    return done, [json.loads(line) for line in kept[0].read_text().splitlines()]


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """(the completed process of a proof of some cells of stage A, its records, its result folder)."""
    folder = tmp_path_factory.mktemp("proof")
    where = "strategy in ['single', 'fsdp2'] and precision == 'fp16' or memory_limit_gib != None or seq_len in [32, 40]"
    done, records = prove(folder, "--only", "A", "--where", where)
    assert done.returncode == 0, done.stdout + done.stderr
    (result_folder,) = folder.iterdir()
    return done, records, result_folder


def test_cells_are_proven_and_a_record_of_each_is_kept(proven):
    done, all_records, folder = proven
    (with_snapshot,) = [record for record in all_records if record.get("files")]
    records = [record for record in all_records if record is not with_snapshot]
    assert [(record["strategy"], record["state"], record["verdict"]) for record in records] == [
        ("single", "completed", "holds"), ("fsdp2", "completed", "holds"),
        ("fsdp2", "completed", "holds"), ("fsdp2", "completed", "holds"), ("single", "oom", "holds"),
    ]  # fmt: skip
    assert records[3]["why"] == "resumed from step 2; losses equal"
    assert all(record["over"] == "NCCL" for record in all_records)
    completed = [record for record in records if record["state"] == "completed"]
    assert all(record["step_ms"] > 0 for record in completed)
    assert [msgspec.convert(record["cell"], Cell).strategy for record in completed] == ["single", "fsdp2", "fsdp2", "fsdp2"]
    assert "6 holds, 0 fails, 0 dropped" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"HOST.json", "proof.jsonl", "table.txt", *with_snapshot["files"]}


@pytest.mark.parametrize(
    ("name", "gpus", "cells"),
    [
        ("one-rank", 1, 42),
        ("shared-gpu", 1, 11),
        *(("every-gpu", gpus, 19) for gpus in (2, 3, 8)),
        ("meshes", 4, 4),
        ("meshes", 6, 4),
    ],
)
def test_each_matrix_of_the_proof_can_be_planned_for_any_number_of_gpus(tmp_path, monkeypatch, name, gpus, cells):
    monkeypatch.syspath_prepend(GPU)
    import cells as of_proof

    (tmp_path / "proof.yaml").write_text(of_proof.sized((GPU / f"{name}.yaml").read_text(), gpus))
    planned = plan.plan_matrix(Workspace(tmp_path), str(tmp_path / "proof.yaml"), THIS_MACHINE, where=None, repeats=None)
    assert len(planned.cells) == cells
    if name in ("every-gpu", "meshes"):
        assert {cell.gpus for cell in planned.cells} == {gpus}


def test_a_dropped_check_does_not_replace_one_that_was_made(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(GPU)
    import records

    for verdict in ("holds", "dropped", "fails", "dropped"):
        kept = records.Records(tmp_path)
        kept.add({"stage": "A", "name": "x", "verdict": verdict, "why": verdict})
        if verdict == "holds":
            kept.add({"stage": "A", "name": "y", "verdict": "dropped", "why": "the time was over"})
    found = [json.loads(line) for line in (tmp_path / "proof.jsonl").read_text().splitlines()]
    assert [(record["name"], record["verdict"]) for record in found] == [("x", "fails"), ("y", "dropped")]
    assert (tmp_path / "table.txt").read_text().splitlines()[-1] == "0 holds, 1 fails, 1 dropped"


OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 2, "dur": 5, "pid": 0, "tid": 7, "args": {"device": 0, "stream": 7}}


def test_the_check_of_a_result_folder_needs_no_gpu(proven, tmp_path):
    """The check of a result folder needs no GPU. A fake GPU makes no trace, because it has no CUPTI, so the test writes one."""
    folder = shutil.copytree(proven[2], tmp_path / "result")
    assert problems(folder) == ["nothing of stage C holds", "nothing of stage D holds"]
    (record,) = [dict(record) for record in proven[1] if record.get("files")]
    (snapshot,) = record["files"]
    with gzip.open(folder / snapshot, "wt") as file:
        file.write("{}")
    assert "has no segments" in " ".join(problems(folder))

    record["files"] = ["x-trace.json.gz"]
    (folder / "proof.jsonl").write_text(json.dumps(record))
    (folder / "table.txt").write_text("1 holds, 0 fails, 0 dropped\n")
    for events, wrong in (([OPERATOR], ["x-trace.json.gz has no kernels of a GPU"]), ([OPERATOR, KERNEL], [])):
        with gzip.open(folder / "x-trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
        assert problems(folder)[2:] == [f"{record['name']}: {why}" for why in wrong]

    (folder / "proof.jsonl").write_text(json.dumps({**record, "verdict": "fails"}))
    assert {"nothing of stage A holds", "table.txt does not end with: 0 holds, 1 fails, 0 dropped"} <= set(problems(folder))


RESULTS = sorted(path.parent for path in (ROOT / "docs" / "results").glob("*/proof.jsonl"))


def test_docs_name_each_check_of_the_kept_results_that_fails():
    """A check that the section of its folder does not name must hold."""
    page = (ROOT / "docs" / "gpus.md").read_text()
    assert ("Nothing of this project has run on a GPU yet" in page) == (not RESULTS)
    for folder in RESULTS:
        (section,) = (part for part in page.split("\n## ") if f"docs/results/{folder.name}" in part)
        assert [problem for problem in problems(folder) if f"`{problem.partition(': ')[0]}`" not in section] == []


def test_ranks_that_share_a_gpu_are_proven_over_the_host(tmp_path):
    done, records = prove(tmp_path, "--only", "B", "--where", "strategy in ['ddp', 'pp-1f1b']")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(record["strategy"], record["ranks"], record["over"]) for record in records] == [
        ("ddp", 2, "gloo over the host"), ("pp-1f1b", 2, "gloo over the host"),
    ]  # fmt: skip


CHECKS = """
import json, pathlib, sys, time
import fake_cuda
fake_cuda.install(pathlib.Path(sys.argv[1]))
import prove, truth
checks = {
    "energy": truth.CHECKS["energy is power over time"],
    "broken": lambda: 1 / 0,
    "another": lambda: {"holds": True, "share": 0.5},
}
proof = prove.Proof(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2]), 1, "", time.monotonic() + 300)
for record in prove._checks(checks, proof):
    print(json.dumps(record))
"""


def test_a_failed_check_is_reported_and_the_other_checks_run(tmp_path):
    """A check that fails or cannot run does not stop the other checks. A fake GPU has no NVML, which the first check needs."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, build.library(), tmp_path], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    energy, broken, another = map(json.loads, done.stdout.splitlines())
    assert energy["verdict"] == "dropped"
    assert energy["why"].startswith("NVML: ")
    assert broken["verdict"] == "fails"
    assert "ZeroDivisionError" in broken["log"]
    assert (another["verdict"], another["share"]) == ("holds", 0.5)


def test_checks_without_time_are_recorded_as_dropped_and_earlier_records_kept(proven, tmp_path):
    """A second call with no time left records its checks as `dropped` and keeps the records of the first call."""
    shutil.copytree(proven[2], tmp_path / proven[2].name)
    done, records = prove(tmp_path, "--minutes", "0", "--only", "C")
    assert done.returncode == 1  # exit code 1: no check of stage C was made
    earlier, dropped = records[: len(proven[1])], records[len(proven[1]) :]
    assert earlier == proven[1]
    assert dropped
    assert {(record["verdict"], record["why"]) for record in dropped} == {("dropped", "the time was over")}


SPEED = """
import json, pathlib, sys
import fake_cuda
fake_cuda.install(pathlib.Path(sys.argv[1]))
import forked, speed
from shardlab.matrix.cell import Optimizer
speed.LARGE = {"workload": "gpt2-tiny", "seq_len": 16, "optimizer": Optimizer(name="adamw", lr=3e-4, fused=True)}
log = pathlib.Path(sys.argv[2])
checks = (lambda: speed.row(2, 3), *(lambda plain=plain: speed.beside_a_plain_loop(2, 2, 2, plain) for plain in
          (speed.PlainLoop, speed.PlainCastLoop)), lambda: speed.loss_beside_torchs(64, 501, 2))
for check in checks:
    print(json.dumps(forked.answer(check, 100, log)))
"""


def test_the_loops_whose_speed_is_compared_run(tmp_path):
    """The training loops whose speed the proof compares run to their end. Their speed on a fake GPU means nothing."""
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", SPEED, build.library(), log], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in answers] == [0, 0, 0, 0], done.stderr + log.read_text()
    row, *besides, loss = (found for _, found in answers)
    assert all(msgspec.convert(found["cell"], Cell).strategy == "single" for found in (row, *besides))
    assert loss["loss_ms"] > 0
    assert 2 * 64 * 501 * 4 <= loss["extra_bytes"] <= 3 * 64 * 501 * 4  # the logits in fp32 and their log-softmax
    assert row["step_ms"] > 0
    assert row["mfu_pct"] > 0
    assert all(found["ratio"] > 0 and found["plain_step_ms"] > 0 for found in besides)


SAMPLER = """
import json, pathlib, sys
import fake_cuda
fake_cuda.install(pathlib.Path(sys.argv[1]))
import truth
print(json.dumps(truth.the_sampler_keeps_its_rate(2.5)))
"""


def test_the_sampler_is_measured_with_the_library_of_the_driver(tmp_path):
    command, variables = [sys.executable, "-c", SAMPLER, build.library()], sampler.stub(tmp_path, 8)
    done = subprocess.run(command, env=ENVIRONMENT | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["core_pct_at_1_hz"] < found["core_pct_at_10_hz"]
    assert 0 < found["samples_per_s_at_10_hz"] < 12


@pytest.mark.skipif(bool(host.read_host().gpus), reason="has a GPU: it would begin to measure")
def test_gpu_proof_on_a_machine_without_a_gpu_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, GPU / "prove.py", "--out", tmp_path], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
    assert list(tmp_path.iterdir()) == []
