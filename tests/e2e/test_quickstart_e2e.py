"""The whole path of a new user, in a workspace whose name has spaces and quotes: provision, submit, fetch, summarize."""

import csv
import json

import pytest
import support_browser
from support_e2e import Bench
from support_long import only_in_long_form

from shardlab.hardware import host
from shardlab.runs.run import REHEARSAL_NOTE

pytestmark = pytest.mark.e2e
MATRIX = """\
axes:
  workload: [gpt2-tiny]
zip:
  - strategy: [single, ddp, fsdp2, ddp]
    gpus: [1, 2, 2, 2]
    launcher: [fork, fork, fork, torchrun]
include:
  - {strategy: single, gpus: 1, options.n_embd: 1099511627776, launcher: fork, workload: vit-tiny, expect: [oom]}
"""
REPEATED = "strategy == 'ddp' and launcher == 'fork'"  # the cell that runs twice, so that its metrics have an interval


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The workspace after the commands `provision`, `jobs submit`, `collect fetch` and `collect summarize` have run in it."""
    bench = Bench(tmp_path_factory.mktemp("quickstart"))
    (bench.path / "cluster.yaml").write_text("schema: 1\nname: here\nprovider: local\n")
    assert bench.json("provision", str(bench.path / "cluster.yaml"))["verified"] is True
    name = bench.matrix(MATRIX, steps=10)
    # The report is about the matrix as it was submitted last, so the cell that runs twice comes first.
    bench.run("jobs", "submit", "--matrix", name, "--repeats", "2", "--where", REPEATED, "--wait")
    bench.run("jobs", "submit", "--matrix", name, "--wait")
    bench.run("collect", "fetch")
    bench.printed = bench.run("collect", "summarize", "-v").stdout
    bench.summary = json.loads((bench.path / "report" / "summary.json").read_text())
    return bench


def row(walked, **keys):
    (found,) = [r for r in walked.summary["rows"] if all(r["cell"][key] == value for key, value in keys.items())]
    return found


def test_the_summary_has_the_state_of_every_cell(walked):
    assert {next(iter(r["states"])) for r in walked.summary["rows"] if r["cell"]["workload"] == "gpt2-tiny"} == {"completed"}
    assert row(walked, workload="vit-tiny")["states"] == {"oom": 1}
    assert {failure["state"] for failure in walked.summary["failures"]} == {"oom"}
    assert len(walked.summary["rows"]) == 5


def test_all_strategies_and_launchers_did_the_same_work(walked):
    losses = {}
    for folder in walked.folders():
        run = folder.read_run()
        if run.cell.workload == "gpt2-tiny":
            ranks = [[r.loss for r in folder.steps(rank).records] for rank in range(run.world.world_size)]
            losses[folder.run_id] = [sum(step) / len(step) for step in zip(*ranks, strict=True)]
    reference = losses[row(walked, strategy="single", workload="gpt2-tiny")["runs"][0]["run_id"]]
    assert len(losses) == 5
    assert len(reference) == 10
    assert reference[-1] < reference[0]
    for run_id, found in losses.items():
        assert max(abs(a - b) for a, b in zip(found, reference, strict=True)) < 1e-4, run_id
    assert "same losses with both launchers" in walked.printed


def test_numbers_have_units_and_leave_out_what_was_not_measured(walked):
    metrics = row(walked, strategy="ddp", launcher="fork")["metrics"]
    assert metrics["throughput_per_s"]["unit"] == "tokens/s"
    assert metrics["throughput_per_s"]["low"] <= metrics["throughput_per_s"]["value"] <= metrics["throughput_per_s"]["high"]
    assert all(metric["unit"] for metric in metrics.values())
    assert row(walked, strategy="single", workload="gpt2-tiny")["metrics"].keys() >= {"throughput_per_s", "final_loss"}
    of_gpus = {"gpu_pct", "gpu_memory_pct", "reserved_memory_bytes", "mfu_pct", "energy_j"}
    assert of_gpus <= {metric["name"] for metric in walked.json("collect", "metrics")}
    if not host.read_host().gpus:
        assert not of_gpus & metrics.keys()
    assert row(walked, workload="vit-tiny")["metrics"].keys() == {"oom_requested_bytes"}  # as the error of torch says


def test_every_output_of_a_rehearsal_is_marked(walked):
    page = (walked.path / "report" / "index.html").read_text()
    assert REHEARSAL_NOTE in walked.printed
    assert REHEARSAL_NOTE in page
    # One of the six runs is by torchrun, whose ranks use GPUs if there are any.
    marked = 5 if host.read_host().gpus else 6
    assert f"{marked} of them a {REHEARSAL_NOTE}" in walked.run("jobs", "status").stdout
    assert sum(folder.read_run().rehearsal for folder in walked.folders()) == marked


@only_in_long_form
@support_browser.needed
def test_the_report_opens_in_a_browser(walked):
    support_browser.check(walked.path / "report" / "index.html")


def test_the_tables_of_the_report_are_files(walked):
    with (walked.path / "report" / "tables" / "summary.csv").open() as handle:
        assert len(list(csv.DictReader(handle))) == 5
    assert (walked.path / "report" / "tables" / "summary.parquet").read_bytes().startswith(b"PAR1")


def test_a_second_walk_changes_nothing_and_runs_nothing(walked):
    runs = {p: p.stat().st_mtime_ns for p in (walked.path / "runs").rglob("*") if p.is_file()}
    assert walked.json("provision", str(walked.path / "cluster.yaml"))["changes"] == 0
    again = walked.run("jobs", "submit", "--matrix", str(walked.path / "small.yaml"), "--wait")
    assert "0 run(s) submitted, 5 skipped" in again.stdout
    walked.run("collect", "fetch")
    assert {p: p.stat().st_mtime_ns for p in (walked.path / "runs").rglob("*") if p.is_file()} == runs
