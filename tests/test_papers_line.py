"""The five studies at --scale tiny, each from its matrix to its report and verdicts, on forked ranks and one torchrun."""

import json

import pytest
import support_browser
from support_line import Bench

pytestmark = pytest.mark.line
CELLS = {"paper5": 10, "paper2": 24, "paper3": 45, "paper4": 37, "paper1": 59}
ARRIVAL = "each worker's gradient is an update by itself, in the order of arrival: no two runs do the same work"
OVERFLOWS = "one process has gradients that are not finite in its first 3 steps"
# Each needs a figure that only a GPU gives; paper1's network bytes need samples, of which a twin may be too short to get any.
NOT_MEASURED = {
    "paper1": {"p1-deepspeed-more-network", "p1-full-shard-least-network"},
    "paper2": {"p2-check-memory"},
    "paper3": {"p3-gpu-use-comparable", "p3-sync-uses-gpu-more", "p3-memory-below-half"},
}
WORDS = {"reproduced", "contradicted", "undecided", "not run"}


def unprovable(cell):
    """Why a cell's work cannot be proven, as far as that is known; None for all others, which have to be proven."""
    if cell.strategy in ("ps-async", "ps-ssp"):
        return ARRIVAL
    # BatchNorm frozen at the statistics of 4 or 2 images, which a micro-batch of the twin has, is too steep for fp16.
    if cell.workload == "efficientnet-v2-l-tiny" and cell.gpus > 1:
        return OVERFLOWS
    return None


@pytest.mark.parametrize("study", CELLS)
def test_a_study_is_rehearsed_from_end_to_end(study, tmp_path):
    bench = Bench(tmp_path)
    submit = ("jobs", "submit", "--matrix", study, "--scale", "tiny", "--wait")
    sent = bench.json(*submit, limit_s=1800)
    assert [run["state"] for run in sent["runs"]] == ["completed"] * CELLS[study]

    found = [(folder.read_run(), folder.read_result()) for folder in bench.folders()]
    assert all(run.rehearsal and result.rehearsal and run.scale == "tiny" for run, result in found)
    assert sum(run.launcher == "torchrun" for run, _ in found) == 1
    for run, result in found:
        why = unprovable(run.cell)
        assert result.same_work.verdict == ("not provable" if why else "proven"), (run.run_id, result.same_work.why)
        assert why is None or result.same_work.why.startswith(why)
    if study == "paper5":
        everyone_saw_the_same(found)

    again = bench.run(*submit)
    assert again.stdout.count("left alone: completed already") == CELLS[study]
    assert "rehearsal" in again.stdout + again.stderr

    bench.run("collect", "fetch")
    assert "rehearsal on CPU" in bench.run("collect", "summarize").stdout
    assert "rehearsal" in (bench.path / "report" / "index.html").read_text()
    summary = json.loads((bench.path / "report" / "summary.json").read_text())
    assert summary["rehearsal"]
    assert [row["states"] for row in summary["rows"]] == [{"completed": 1}] * CELLS[study]
    assert not summary["failures"]
    assert not summary["damage"]
    judged(study, bench.json("collect", "verdicts"), summary)
    assert "(rehearsal)" in bench.run("collect", "verdicts").stdout
    if support_browser.CHROMIUM:
        support_browser.check(bench.path / "report" / "index.html")


def everyone_saw_the_same(found):
    """Every cell of paper5 passes over the same images twice, the control in four times the steps of 4 ranks."""
    steps = {(run.cell.strategy, run.cell.gpus): result.steps for run, result in found}
    assert steps == {("single", 1): 32, ("ddp", 2): 16, ("ddp", 4): 8, ("zero3", 2): 16, ("zero3", 4): 8}
    watched = {run.cell.rehearses.epochs: set(result.instruments) for run, result in found}
    assert watched == {100: {"validation"}, 10: {"memory"}}


def judged(study, told, summary):
    """Every claim has a verdict by one of the words, and numbers wherever a CPU gives them."""
    assert told["rehearsal"]
    verdicts = told["verdicts"]
    assert verdicts == summary["verdicts"]
    assert {verdict["verdict"] for verdict in verdicts} <= WORDS
    assert "is no metric" not in json.dumps(told)
    assert {verdict["id"] for verdict in verdicts if verdict["verdict"] == "not run"} <= NOT_MEASURED.get(study, set())
    for verdict in verdicts:
        assert verdict["verdict"] == "not run" or (verdict["numbers"] and verdict["rehearsal"]), verdict["id"]
    assert told["reported"], "each number that the study prints stands beside what was measured"
