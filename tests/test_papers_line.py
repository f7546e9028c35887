"""A whole study at --scale tiny, from its matrix to its report, on forked ranks and one torchrun."""

import pytest
import support_browser
from support_line import Bench

pytestmark = pytest.mark.line


def test_a_study_is_rehearsed_from_end_to_end(tmp_path):
    bench = Bench(tmp_path)
    sent = bench.json("jobs", "submit", "--matrix", "paper5", "--scale", "tiny", "--wait")
    assert [run["state"] for run in sent["runs"]] == ["completed"] * 10
    results = [(folder.read_run(), folder.read_result()) for folder in bench.folders()]
    assert all(run.rehearsal and result.rehearsal and run.scale == "tiny" for run, result in results)
    assert sum(run.launcher == "torchrun" for run, _ in results) == 1
    assert {result.same_work.verdict for _, result in results} == {"proven"}
    # every cell passes over the same images twice, the control in four times the steps of 4 ranks
    steps = {(run.cell.strategy, run.cell.gpus): result.steps for run, result in results}
    assert steps == {("single", 1): 32, ("ddp", 2): 16, ("ddp", 4): 8, ("zero3", 2): 16, ("zero3", 4): 8}
    watched = {run.cell.rehearses.epochs: set(result.instruments) for run, result in results}
    assert watched == {100: {"validation"}, 10: {"memory"}}
    again = bench.run("jobs", "submit", "--matrix", "paper5", "--scale", "tiny", "--wait")
    assert again.stdout.count("left alone: completed already") == 10
    assert "rehearsal" in again.stdout + again.stderr
    bench.run("collect", "summarize")
    assert "rehearsal" in (bench.path / "report" / "index.html").read_text()
    if support_browser.CHROMIUM:
        support_browser.check(bench.path / "report" / "index.html")
