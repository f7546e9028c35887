"""Follows docs/how-to/own-script.md as a reader would: an unchanged script is compared under two options, on this machine."""

import json

import pytest
from support_e2e import benches
from support_page import follow

from shardlab.runs.rundir import RunDir

pytestmark = pytest.mark.e2e
STEPS = {"steps": {"regex": r"step (?P<step>\d+) loss (?P<loss>\S+)"}}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The workspace with the files of the page, after all commands of the page have run."""
    for bench in benches(tmp_path_factory.mktemp("own script")):
        bench.printed = follow(bench, "how-to/own-script.md")
        yield bench


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


def submit_script(bench, script, code=0, defaults=None, **workload):
    """Submit one run of a script. Returns its folder. defaults, workload: further keys of the matrix and of its workload."""
    (bench.path / "own").mkdir(exist_ok=True)
    (bench.path / "own" / "model.py").write_text("MINE = 2.5")
    (bench.path / "own" / "train.py").write_text(script)
    command = {"command": ["python", "train.py"], "folder": "own", **workload}
    matrix = {"schema": 1, "name": "own", "defaults": {"launcher": "none", "workload": command, **(defaults or {})}}
    (bench.path / "own.yaml").write_text(json.dumps(matrix))  # JSON is YAML
    bench.run("jobs", "submit", "--matrix", str(bench.path / "own.yaml"), "--wait", code=code)
    return RunDir(max((bench.path / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns))


def test_an_unchanged_script_is_compared_under_two_options(followed):
    rows = json.loads((followed.path / "report" / "summary.json").read_text())["rows"]
    assert [row["states"] for row in rows] == [{"completed": 3}] * 2
    assert [row["cell"]["set"] for row in rows] == [{"batch": 2000}, {"batch": 4000}]
    assert {row["same_work"]["verdict"] for row in rows} == {"not proven"}
    assert all(row["metrics"]["throughput_per_s"]["unit"] == "steps/s" for row in rows)
    plan = followed.run("jobs", "plan", "--matrix", str(followed.path / "mine.yaml"))
    assert "the sample line tells step 7, loss 0.521" in plan.stderr
    printed = followed.printed["collect summarize --matrix mine"]
    assert ("(label)" in printed, "Final loss" in printed, "nats" in printed) == (True, True, False)
    report = (followed.path / "report" / "index.html").read_text()
    assert "Compared: command (label) on mine" in report
    assert "As the command told it; its unit is not known" in report


def test_the_folder_of_the_script_stays_as_it_was(followed):
    assert [path.name for path in (followed.path / "mine").iterdir()] == ["train.py"]
    (run_path, *_) = (followed.path / "runs").iterdir()
    assert [path.name for path in (run_path / "work").iterdir()] == ["train.py"]


def test_a_script_reports_its_steps_and_a_later_attempt_gets_its_checkpoint(bench):
    script = """
import sys
from pathlib import Path
from shardlab.steps import report
start = int(Path(sys.argv[2]).read_text()) if "--from" in sys.argv else 0
for step in range(start + 1, start + 6):
    report(step=step, loss=1 / step, tokens=100)
    Path(f"saved-{step}").write_text(str(step))
sys.exit("--from" not in sys.argv)
"""
    first = submit_script(bench, script, code=1, checkpoint="saved-*", resume=["--from", "{checkpoint}"])
    assert first.judge().state == "failed"
    bench.run("jobs", "retry", "--wait")
    second = RunDir(first.path.with_name(f"{first.run_id}-a2"))
    assert second.judge().state == "completed"
    assert [record.step for record in second.steps(0).records] == [6, 7, 8, 9, 10]
    result = second.read_result()
    assert (result.unit, result.steps, result.final_loss) == ("tokens", 4, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("script", "state", "why"),
    [
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "oom", "CUDA out of memory"),
        ("import sys; sys.exit('no such file: data.bin')", "failed", "no such file: data.bin"),
        ("print('hello')", "failed", "told no step"),
        ("for step in range(3): print('step', step, 'loss', 'nan')", "failed", "no finite number at step 1"),
    ],
)
def test_the_end_of_a_command_is_named(bench, script, state, why):
    judged = submit_script(bench, script, code=1, **STEPS).judge()
    assert (judged.state, why in judged.why) == (state, True), judged


def test_variables_of_env_reach_a_command_that_imports_a_file_beside_it(bench):
    script = "import os, model\nfor step in range(3): print('step', step, 'loss', float(os.environ['MINE']) + model.MINE)"
    run_dir = submit_script(bench, script, defaults={"env": {"MINE": 2.5}}, **STEPS)
    assert run_dir.read_result().final_loss == 5.0


def test_variables_of_env_reach_the_ranks_of_a_training(bench):
    bench.run("jobs", "submit", "--matrix", bench.matrix("  strategy: single\n  env: {OMP_NUM_THREADS: 1}"), "--wait")
    (run_path,) = (bench.path / "runs").iterdir()
    (environment,) = (run_path / "env").iterdir()
    assert json.loads(environment.read_text())["variables"]["OMP_NUM_THREADS"] == "1"
