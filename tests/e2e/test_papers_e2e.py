"""Runs the five shipped studies at --scale tiny, from the matrix to the report and the verdicts. The ranks are forked, except
that one cell of each study uses torchrun.

`make test-long` runs all cells. `make test-all` runs all cells of study 5, and of studies 1, 2, 3 and 4 only the cells that the
expressions in SOME select. These are the cells of the claims in CLAIMS; all other claims are about more cells.
test_same_work.py proves each strategy, and test_metrics.py tests each metric.
"""

import json
from typing import Any, NamedTuple

import pytest
import support_browser
from support_e2e import Bench
from support_long import LONG

from shardlab.runs.run import REHEARSAL_NOTE

pytestmark = pytest.mark.e2e
SOME = {
    "paper2": "strategy == 'single' and (steps == 20 or workload == 'gpt2' and (steps == 3 or micro_batch_size in [1, 4, 64])) "
    "or gpus == 2 and (strategy == 'ddp' or steps == 5 and strategy in ['fsdp1-full-shard', 'fsdp1-shard-grad-op'])",
    "paper1": "strategy in ['zero2', 'zero3', 'fsdp1-full-shard'] and activation_checkpointing == 'none' "
    "and (gpus == 8 and global_batch_size == 512 or gpus == 4 and global_batch_size == 256)",
    "paper4": "strategy == 'ddp' and gpus == 1 and workload != 'resnet50' "
    "or workload == 'gpt2' and gpus == 2 and global_batch_size == 16 and strategy != 'pp-1f1b'",
    "paper3": "workload == 'vgg16' and (strategy in ['ddp', 'fsdp1-full-shard'] and gpus < 4 "
    "or strategy in ['ps-sync', 'ps-ssp'] and gpus == 4)",
}
# The claims that are about cells of SOME only. Their verdict has numbers.
CLAIMS = {
    "paper1": {"p1-deepspeed-scales-better", "p1-deepspeed-30-less-memory"},
    "paper2": {
        "p2-ddp-no-memory-savings", "p2-batch-1-to-4", "p2-overhead-62", "p2-idle-order", "p2-overlap-order",
        "p2-exposed-order", "p2-raw-communication-order", "p2-fewer-calls", "p2-larger-transfers", "p2-overhead-order",
        "p2-check-efficiency", "p2-check-overlap", "p2-check-idle",
    },
    "paper3": {"p3-vgg-ratio", "p3-modified-vgg-68"},
    "paper4": {"p4-ddp-beats-tp-and-pp", "p4-tp-saves-memory", "p4-pp-less-volume"},
}  # fmt: skip
ALL = {"paper2": 36, "paper1": 62, "paper4": 45, "paper3": 45}
FORKED = set() if LONG else set(SOME)  # studies in which SOME does not select the cell that uses torchrun
CELLS = {"paper5": 16, **(ALL if LONG else {"paper2": 9, "paper1": 6, "paper4": 7, "paper3": 6})}
# The matrix file of each study asks for repeated runs. Only `make test-long` repeats runs, and only those of one study: its 16
# cells run twice. With all repeats, the tests would take twice as long.
# test_repeats.py checks that the matrix files ask for repeats; it starts no run.
REPEATED = "paper5" if LONG else None
RUNS = CELLS | ({REPEATED: 16 * 2} if REPEATED else {})
ARRIVAL = "each worker's gradient is applied on its own, in the order of arrival, so no two runs do the same work"
OVERFLOWS = "the gradients of one process, or in fp16 those of the strategy, are not finite in the first 3 steps"
# Claims whose verdict may be "not run" when all cells ran. Most need a figure that only a GPU gives, or how the full run of a
# cell ends, such as out of memory. The claims of paper1 need
# the network bytes of telemetry samples, and the run of a tiny twin may end before the first sample.
NOT_MEASURED = {
    "paper1": {
        "p1-deepspeed-more-network",
        "p1-full-shard-least-network",
        "p1-full-shard-most-memory",
        "p1-zero-stages-least-memory",
    },
    "paper2": {"p2-check-memory", "p2-oom-at-64"},
    "paper3": {"p3-gpu-use-comparable", "p3-sync-uses-gpu-more", "p3-memory-below-half", "p3-modified-exceeds-limit"},
    "paper4": {"p4-1.3b-oom", "p4-1.3b-checkpointing", "p4-70b-tp-fsdp", "p4-7b-oom"},
}
WORDS = {"reproduced", "contradicted", "undecided", "not run"}


def as_expected(cell, same_work):
    """Returns whether the same-work proof of a run has the expected verdict: "not provable" for asynchronous parameter servers
    and for a workload whose gradients overflow in fp16, "other work" for local SGD, otherwise "proven"."""
    if cell.strategy == "local-sgd":
        return same_work.verdict == "other work" and same_work.communication_bytes.get("counted")
    if cell.strategy in ("ps-async", "ps-ssp"):
        return same_work.verdict == "not provable" and same_work.why.startswith(ARRIVAL)
    # BatchNorm is frozen in this deep model, so its gradients are near the largest fp16 number. Which of them overflow depends
    # on the processor.
    if cell.workload == "efficientnet-v2-l-tiny" and cell.gpus > 1 and same_work.why.startswith(OVERFLOWS):
        return same_work.verdict == "not provable"
    return same_work.verdict == "proven"


class Rehearsed(NamedTuple):
    """A study after the test ran four commands on it. sent: the runs of the study, as `jobs submit` reported them; summarized:
    the output of `collect summarize`."""

    name: str
    bench: Bench
    sent: list[dict[str, Any]]
    summarized: str
    summary: dict[str, Any]


@pytest.fixture(scope="module", params=CELLS)
def rehearsed(request, tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp(request.param))
    sent = bench.json(*submit(request.param), limit_s=7200)["runs"]
    bench.run("collect", "fetch")
    summarized = bench.run("collect", "summarize").stdout
    summary = json.loads((bench.path / "report" / "summary.json").read_text())
    return Rehearsed(request.param, bench, sent, summarized, summary)


def submit(study):
    once = () if study == REPEATED else ("--repeats", "1")
    some = ("--where", SOME[study]) if study in SOME and not LONG else ()
    return ("jobs", "submit", "--matrix", study, "--scale", "tiny", "--wait", *once, *some)


def test_a_study_is_rehearsed_from_end_to_end(rehearsed):
    study, bench, sent, printed, summary = rehearsed
    assert [run["state"] for run in sent] == ["completed"] * RUNS[study]

    found = [(folder.read_run(), folder.read_result()) for folder in bench.folders()]
    assert all(run.rehearsal and result.rehearsal and run.scale == "tiny" for run, result in found)
    assert len({run.cell_hash for run, _ in found if run.launcher == "torchrun"}) == (study not in FORKED)
    for run, result in found:
        assert as_expected(run.cell, result.same_work), (run.run_id, result.same_work)
    if study == "paper5":
        everyone_saw_the_same(found)

    for text in (printed, (bench.path / "report" / "index.html").read_text()):
        assert REHEARSAL_NOTE in text
        assert "synthetic data in" in text
    assert summary["rehearsal"]
    rows = [row for row in summary["rows"] if row["n"]]  # rows of cells without a run have n = 0
    assert len(rows) == CELLS[study]
    assert {state for row in rows for state in row["states"]} == {"completed"}
    assert sum(row["n"] for row in rows) == RUNS[study]
    assert not summary["failures"]
    assert not summary["damage"]
    judged(study, bench.json("collect", "verdicts"), summary)
    assert "(rehearsal)" in bench.run("collect", "verdicts").stdout


def test_a_second_submit_of_a_study_sends_nothing(rehearsed):
    again = rehearsed.bench.run(*submit(rehearsed.name))
    assert again.stdout.count("skipped: completed already") == RUNS[rehearsed.name]
    assert "rehearsal" in again.stdout + again.stderr


def test_nothing_in_the_archive_of_a_study_is_taken_for_a_secret(rehearsed):
    rehearsed.bench.run("collect", "archive")


@support_browser.needed
def test_the_report_of_a_study_opens_in_a_browser(rehearsed):
    support_browser.check(rehearsed.bench.path / "report" / "index.html")


def everyone_saw_the_same(found):
    """Checks that all runs of paper5 read the same number of images: the cell with one rank makes four times as many steps as
    the cells with 4 ranks."""
    strategies = ("ddp", "local-sgd", "zero1", "zero2", "zero3")
    steps = {(run.cell.strategy, run.cell.gpus): result.steps for run, result in found}
    assert steps == {("single", 1): 32} | {(name, gpus): 32 // gpus for name in strategies for gpus in (2, 4)}
    watched = {(run.cell.rehearses.epochs, run.cell.strategy): set(result.instruments) for run, result in found}
    assert watched == {
        (epochs, name): {"profile"} if name == "local-sgd" else {"memory" if epochs == 10 else "validation"}
        for epochs, name in watched
    }


def judged(study, told, summary):
    """Checks that the verdict of every claim is in WORDS, and has numbers unless it is "not run". If all cells ran, only claims
    in NOT_MEASURED are "not run"; otherwise the claims in CLAIMS have numbers."""
    assert told["rehearsal"]
    verdicts = told["verdicts"]
    assert verdicts == summary["verdicts"]
    assert {verdict["verdict"] for verdict in verdicts} <= WORDS
    assert "is not a metric" not in json.dumps(told)
    judged_claims = {verdict["id"] for verdict in verdicts if verdict["verdict"] != "not run"}
    every_claim = {verdict["id"] for verdict in verdicts}
    assert judged_claims >= (every_claim - NOT_MEASURED.get(study, set()) if LONG or study not in SOME else CLAIMS[study])
    for verdict in verdicts:
        assert verdict["verdict"] == "not run" or (verdict["numbers"] and verdict["rehearsal"]), verdict["id"]
    assert told["reported"], "each number that the study prints stands beside what was measured"
