"""`collect explain` names the record lines from which a number was computed. The tests compute the number from these lines."""

import json

import pytest
import support_collect as support

from collect import cli
from collect.explain.read_files import format_line_numbers
from collect.metric import set_workspace_metrics


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return support.matrix(tmp_path_factory.mktemp("explain"))


@pytest.fixture(autouse=True)
def _menu_without_own_metrics():
    """Removes the metrics of a workspace from the menu of this process, which later tests read."""
    yield
    set_workspace_metrics([])


def explained(capsys, workspace, *words):
    code = cli.main(["explain", *words, "--workspace", str(workspace.path), "--json"])
    return code, json.loads(capsys.readouterr().out)


def lines_of(workspace, file):
    """The records in the lines of a file that the document of `collect explain` names. file: the document's entry about it."""
    every = (workspace.path / file["file"]).read_bytes().split(b"\n")
    edges = [part.split("-") for part in file["lines"].split(", ")]
    return [json.loads(every[number - 1]) for edge in edges for number in range(int(edge[0]), int(edge[-1]) + 1)]


def test_the_throughput_follows_from_the_lines_that_are_named(workspace, capsys):
    code, said = explained(capsys, workspace, "ddp x2", "throughput_per_s")
    values = []
    for run in said["runs"]:
        ranks = [lines_of(workspace, file) for file in run["files"] if "/steps/" in file["file"]]
        assert len(ranks) == 2
        assert not any(record.get("warmup") for records in ranks for record in records)
        slowest = [max(pair) for pair in zip(*([record["step_ms"] for record in records] for records in ranks), strict=True)]
        units = sum(record["units"] for records in ranks for record in records)
        assert run["inputs"] == pytest.approx({"steps": 10, "step_ms": sum(slowest), "units": units})
        assert run["value"] == pytest.approx(1000 * units / sum(slowest))
        values.append(run["value"])
    assert (code, said["n"], said["label"]) == (0, 3, "ddp ×2")
    assert said["value"] == pytest.approx(sum(values) / 3)
    assert said["low"] < said["value"] < said["high"]
    assert "tokens/s" in said["formula"]


def test_the_lines_of_samples_enclose_the_timed_window(workspace, capsys):
    _, said = explained(capsys, workspace, "ddp x2", "network_bytes")
    for run in said["runs"]:
        by_file = {file["file"].split("/")[2]: lines_of(workspace, file) for file in run["files"] if file["lines"]}
        first, *_, last = by_file["samples"]
        assert first["wall_s"] <= by_file["steps"][0]["wall_s"]
        assert last["wall_s"] >= by_file["steps"][-1]["wall_s"]


def test_every_value_is_that_of_the_summary(workspace, capsys):
    cli.main(["summarize", "--workspace", str(workspace.path), "--json"])
    row = next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["cell"]["strategy"] == "ddp")
    assert len(row["metrics"]) > 10
    for name, estimate in row["metrics"].items():
        code, said = explained(capsys, workspace, row["id"], name)
        assert (code, said["value"], said["unit"], said["why"]) == (0, estimate["value"], estimate["unit"], ""), name
        assert not any(run["why"] for run in said["runs"]), name


def test_a_damaged_line_is_not_among_the_lines(tmp_path, capsys):
    workspace = support.matrix(tmp_path)
    run = next(workspace.runs.glob("single-*-r1"))
    steps = run / "steps" / "rank-00000.jsonl"
    lines = steps.read_bytes().split(b"\n")
    steps.write_bytes(b"\n".join([*lines[:4], b"not a record", *lines[4:]]))
    _, said = explained(capsys, workspace, "single x1", "step_time_ms")
    assert {file["lines"] for file in said["runs"][0]["files"] if file["lines"]} == {"3-4, 6-13"}


def test_a_comparison_has_both_means_and_the_runs_of_both_rows(workspace, capsys):
    _, said = explained(capsys, workspace, "ddp ×2", "speed_up")
    mine, baseline = said["terms"]
    assert said["value"] == pytest.approx(mine["value"] / baseline["value"])
    assert (mine["label"], baseline["label"]) == ("ddp ×2", "single ×1")
    assert {run["cell"] for run in said["runs"]} == {mine["cell"], baseline["cell"]}


@pytest.mark.parametrize(
    ("row", "metric", "why"),
    [
        ("zero3 x2", "throughput_per_s", "no repeat completed (planned)"),
        ("zero3 x2", "speed_up", "has no value of throughput_per_s"),
        ("ddp x2", "memory_over_prediction", "the run has no prediction.json"),
        ("ddp x2", "mfu_pct", "do not have what the definition needs"),
    ],
)
def test_an_unknown_value_has_its_reason(workspace, capsys, row, metric, why):
    code, said = explained(capsys, workspace, row, metric)
    assert (code, said["value"], said["formula"]) == (0, None, "")
    assert why in said["why"]


def test_an_incomplete_run_has_the_reason_why_its_value_is_missing(workspace, capsys):
    _, said = explained(capsys, workspace, "fsdp2 x2", "step_time_ms")
    assert [run["value"] is None for run in said["runs"]] == [False, False, True]
    assert said["runs"][2]["why"].startswith("failed: ")


def test_a_row_has_several_names(workspace, capsys):
    ids = set()
    for name in ("DDP x2", "ddp-gpt2-tiny-g2-b8-9"):
        ids.add(explained(capsys, workspace, name, "step_time_ms")[1]["cell"])
    (row,) = ids
    assert explained(capsys, workspace, f"{row}-r2", "step_time_ms")[1]["cell"] == row


@pytest.mark.parametrize(
    ("row", "metric", "said"),
    [
        ("zz", "speed_up", "ROW: found 'zz'. Allowed: single ×1 ("),
        ("ddp", "speed_up", "ROW: found 'ddp', the start of 2 rows. Allowed: ddp ×2 ("),
        ("ddp x2", "speedup", "unknown metric 'speedup'. Did you mean 'speed_up'? Allowed: "),
        ("ddp x2", "time_to_accuracy_s", "unknown metric"),  # needs an argument, so it is in no row
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_are_allowed(workspace, capsys, row, metric, said):
    assert cli.main(["explain", row, metric, "--workspace", str(workspace.path)]) == 2
    assert said in capsys.readouterr().err


def test_the_terminal_names_files_and_lines(workspace, capsys):
    assert cli.main(["explain", "ddp x2", "throughput_per_s", "--workspace", str(workspace.path)]) == 0
    text = capsys.readouterr().out
    assert "ddp ×2: throughput_per_s = 8,676 tokens/s" in text
    assert any(line.split()[-2:] == ["steps/rank-00001.jsonl", "3-12"] for line in text.splitlines())


def own_count(tmp_path, reads=""):
    """A workspace with the metric `count` of its own. reads: what the metric declares to read, as an argument of Metric."""
    workspace = support.matrix(tmp_path)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "count.py").write_text(
        "from collect.loading.loaded_run import Quantity\n"
        "from collect.metric import Metric, Reads\n"
        "METRICS = (Metric(name='count', unit='steps', direction='neither', definition='Timed steps.',\n"
        f"                  of_run=lambda run: Quantity(run.world_steps.height, 'steps'), {reads}),)\n"
    )
    return workspace


def test_a_metric_of_the_workspace_names_its_file(tmp_path, capsys):
    code, said = explained(capsys, own_count(tmp_path), "ddp x2", "count", "--trust")
    assert (code, said["value"]) == (0, 10)
    assert said["source"].endswith("metrics/count.py")
    assert not any(run["files"] for run in said["runs"])
    files = "run.json, result.json, steps/rank-*.jsonl, samples/*.jsonl, validation.jsonl, env/*.json, events*.jsonl"
    assert said["files_remark"].startswith(f"count does not declare what it reads, so its values may come from any of {files}")


def test_a_metric_of_the_workspace_that_declares_what_it_reads_names_its_lines(tmp_path, capsys):
    _, said = explained(capsys, own_count(tmp_path, "reads=Reads(steps='timed')"), "ddp x2", "count", "--trust")
    assert said["files_remark"] == ""
    for run in said["runs"]:
        assert [file["lines"] for file in run["files"] if "/steps/" in file["file"]] == ["3-12", "3-12"]


def test_lines_are_written_as_spans():
    assert format_line_numbers([3, 4, 5, 7, 9, 10]) == "3-5, 7, 9-10"
    assert format_line_numbers([]) is None
